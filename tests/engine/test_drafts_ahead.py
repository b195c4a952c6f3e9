"""The device drafts before the host knows which tokens the drafts follow."""

import numpy as np
import pytest

from metal.host import installed
from tests.engine.test_trained_heads import OPTIONS, drafting
from tests.support.models import tiny_models as tiny
from tests.support.models.trained_heads import Head, write_head
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.model.loader import load
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.structured_params import StructuredOutputsParams


@pytest.fixture(autouse=True)
def _host_kernels():
    with installed(writable_inputs=["states"]):
        yield


class Counted:
    """How often drafts were made before the tokens that they follow were known, and after."""

    def __init__(self, engine):
        self.ahead = self.late = 0
        flying, draft = engine.in_flight, engine.runner.draft

        def counted(wanted):
            is_ahead = len(flying.pipeline.steps) > 0
            self.ahead, self.late = self.ahead + is_ahead, self.late + (not is_ahead)
            return draft(wanted)

        engine.runner.draft = counted


def drafting_for_itself(path, **options):
    """A model that drafts for itself: all its drafts are right."""
    engine = drafting(load(path), draft_model=path, attention="kernels", **options)
    return engine, Counted(engine)


@pytest.mark.parametrize("name", ["llama", "llama/window", "deepseek_v3"])
def test_right_drafts_follow_one_another_without_a_gap(name, tmp_path):
    """Also across the ends of blocks, and with the noise of the tokens that they guess."""
    path, prompts = str(tiny.write_folder(tmp_path, name)), tiny.prompts(3, 5, 30, seed=6)
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=5, ignore_eos=True)
    plain = LLMEngine(load(path), EngineConfig(**OPTIONS, speculate="off"))
    engine, made = drafting_for_itself(path, block_size=8)
    assert tiny.answers(engine, prompts, params) == tiny.answers(plain, prompts, params)
    metrics = engine.metrics()
    assert metrics["accepted_tokens"] == metrics["draft_tokens"]
    assert metrics["steps"] <= 2 + 60 / 4 + 2  # prompts, four tokens a step, two without room
    assert made.ahead > 10
    assert made.late <= 1  # the first drafts may need another block


@pytest.mark.parametrize(
    ("name", "most"), [("llama", 999), ("deepseek_v3", 999), ("llama", 16), ("llama/window", 999)]
)
def test_a_draft_model_catches_up_after_a_pause(name, most, tmp_path):
    """It leaves out plain steps, and computes K and V of their tokens before its next drafts."""
    path, prompts = str(tiny.write_folder(tmp_path, name)), tiny.prompts(3, 5, 30, seed=6)
    engine, _ = drafting_for_itself(path, block_size=8, max_num_batched_tokens=most)
    speculator = engine.in_flight.speculator
    speculator._choose = lambda *_: (0, 3 * (engine.metrics()["steps"] % 16 > 7))
    speculator.wants = lambda _: speculator._choose()[1] > 0
    expected = tiny.all_alone(name, prompts, 60)
    assert tiny.answers(engine, prompts, tiny.greedy(60, ignore_eos=True)) == expected
    metrics = engine.metrics()
    assert metrics["steps"] > 25
    assert metrics["draft_tokens"] > 30
    share = metrics["accepted_tokens"] / metrics["draft_tokens"]
    assert share == 1 if name != "llama/window" and most == 999 else share > 0.5


def test_a_draft_model_without_drafts_reads_32_tokens_at_once(tmp_path):
    """So the prefix cache has nearly all of its K and V for the next turn."""
    path, prompts = str(tiny.write_folder(tmp_path, "llama")), tiny.prompts(2, 9, 9, seed=6)
    engine, _ = drafting_for_itself(path, block_size=8, max_num_batched_tokens=99)
    speculator, runner, sizes = engine.in_flight.speculator, engine.runner, []
    speculator._choose, speculator.wants = lambda *_: (0, 0), lambda _: False
    catch_up = runner.catch_up
    runner.catch_up = lambda batch: sizes.append(batch.num_tokens) or catch_up(batch)
    answers = tiny.answers(engine, prompts, tiny.greedy(80, ignore_eos=True))
    assert answers == tiny.all_alone("llama", prompts, 80)
    assert sizes == [64, 64]
    speculator._choose, speculator.wants = lambda *_: (0, 3), lambda _: True
    turns = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    before = engine.metrics()
    tiny.answers(engine, [turn[:72] for turn in turns], tiny.greedy(12, ignore_eos=True))
    metrics = engine.metrics()
    assert metrics["prefix_cache_hit_tokens"] - before["prefix_cache_hit_tokens"] >= 2 * 64
    assert metrics["accepted_tokens"] == metrics["draft_tokens"] > 10


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe_lite"])
def test_wrong_drafts_are_followed_by_those_of_the_head(name, tmp_path):
    path, head = write_head(tiny.write_folder(tmp_path, name), Head(name)), Head(name)
    model, prompts = load(str(path)), tiny.prompts(3, 5, 20, seed=2)
    engine = drafting(model, attention="kernels")
    made = Counted(engine)
    params = tiny.greedy(25, ignore_eos=True)
    assert tiny.answers(engine, prompts, params) == tiny.all_alone(name, prompts, 25)
    assert made.ahead > 10 > 1 >= made.late
    found = engine.in_flight.speculator.made
    assert len(found) > 20
    for known, drafts in found:
        assert drafts == head.drafts(model.packed.model, known, len(drafts))


@pytest.mark.parametrize(
    "how",
    [
        {"presence_penalty": 1.0},
        {"structured_outputs": StructuredOutputsParams(regex="[a-z0-9 ]{40}")},
    ],
    ids=["penalties", "grammars"],
)
def test_drafts_that_depend_on_tokens_wait_for_them(how, tmp_path):
    path, prompts = str(tiny.write_folder(tmp_path, "llama")), tiny.prompts(2, 5, 20, seed=6)
    params = [SamplingParams(max_tokens=30, temperature=0.9, seed=5, **h) for h in (how, {})]
    plain = LLMEngine(load(path), EngineConfig(**OPTIONS, speculate="off"))
    engine, made = drafting_for_itself(path)
    assert tiny.answers(engine, prompts, params) == tiny.answers(plain, prompts, params)
    assert made.late > 2
    metrics = engine.metrics()
    assert metrics["accepted_tokens"] > 0.9 * metrics["draft_tokens"]


def test_lost_steps_and_aborts_lose_their_drafts_alone(tmp_path):
    path, prompts = str(tiny.write_folder(tmp_path, "llama")), tiny.prompts(5, 5, 20, seed=6)
    engine, made = drafting_for_itself(path, block_size=8, num_blocks=16, max_num_seqs=3)
    tiny.submit(engine, prompts, tiny.greedy(30, ignore_eos=True))
    finish, done, steps = engine.in_flight.finish, {}, 0

    def lost():
        raise RuntimeError("lost")

    while engine.has_unfinished_requests():
        steps += 1
        engine.in_flight.finish = lost if steps in (4, 9) else finish
        done.update(tiny.step(engine, RuntimeError))
        if steps == 6:
            engine.abort("1")
    expected = tiny.all_alone("llama", prompts, 30)
    for i in (0, 2, 3, 4):
        assert done[str(i)].outputs[0].token_ids == expected[i]
    assert made.ahead > 10


@pytest.mark.parametrize("how", ["decodes", "varlen", "sdpa", "reference"])
def test_a_step_that_goes_back_is_that_of_the_earlier_positions(how, tmp_path):
    path = str(tiny.write_folder(tmp_path, "llama/window"))
    engine, _ = drafting_for_itself(path, block_size=8)
    tiny.submit(engine, tiny.prompts(3, 20, 60, seed=4), tiny.greedy(30))
    while len(engine.scheduler.decodes) < 3:
        engine.step()
    flying, attention, ones = engine.in_flight, engine.runner.attention, np.ones(3, np.int64)
    seats = np.array(list(flying.seats.req_index.values()))
    last = flying.inputs.num_blocks[seats] * 8 - 1
    shapes, store = engine.model.attention_shapes, attention.store
    if how in ("varlen", "sdpa"):
        failed = ["paged_decode", *["varlen_prefill"] * (how == "sdpa")]
        attention = KernelAttention(store, how, shapes, failed_kernels=failed)
    elif how == "reference":
        attention = ReferenceAttention(store)
    for back in ([0, 0, 0, 0], [1, 7, 8, 0], [9, 3, 0, 0]):
        latest, expected = (
            attention.prepare(flying.inputs.pack(seats, at, ones), 4)
            for at in (last, last - back[:3])
        )
        step = latest._replace(back=mx.array(back, mx.int32))
        moved = attention.begin(step, attention.new_state()).step
        assert moved.back is None
        for found, right in zip(arrays_of(moved), arrays_of(expected), strict=True):
            assert mx.array_equal(found, right), (back, found, right)


def arrays_of(step):
    """The arrays that say where the rows of a step are."""
    rows = getattr(step.plan, "decodes", None) or getattr(step.plan, "prompts", None)
    own = [rows.seq_lens] if hasattr(rows, "seq_lens") else []
    planned = [step.plan.positions] if hasattr(step.plan, "positions") else []
    return [step.positions, *step.slot_mapping, *planned, *own]
