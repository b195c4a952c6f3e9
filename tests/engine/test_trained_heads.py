"""Trained heads and draft models: their drafts are right, and change no token."""

from random import Random
from unittest.mock import patch

import numpy as np
import pytest

from metal.host import installed
from tests.images.test_forward import requests
from tests.support.images import seeing
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import VOCAB
from tests.support.models.trained_heads import NAMES, Head, write_head
from vllm_metal_lite.config import MAX_MODEL_DRAFTS, EngineConfig
from vllm_metal_lite.engine.describe import describe
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.model.drafter import attach
from vllm_metal_lite.model.loader import from_model, load
from vllm_metal_lite.model.trained_heads import new_head
from vllm_metal_lite.prefix_disk import reader
from vllm_metal_lite.prefix_disk.folder import Folder
from vllm_metal_lite.prefix_disk.parts import Parts
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.speculation.speculator import Speculator

OPTIONS = {"num_blocks": 64, "max_model_len": 100, "max_num_batched_tokens": 32}


class ByModel(Speculator):
    """Drafts by the model, in random steps.  made: the known tokens and the drafts."""

    def __init__(self, engine, share=1.0):
        super().__init__(engine.in_flight.seats.tokens_of, self._noted, 3)
        self.made, self.random, self.share = [], Random(0), share
        self._engine, self._own = engine, engine.in_flight.model_drafts.draft

    def _noted(self, wanted):
        drafts, flying = self._own(wanted), self._engine.in_flight
        if any(drafts):
            seats, made = flying.pipeline.runner._drafts
            rows = dict(zip(seats.tolist(), np.array(made).tolist(), strict=True))
            for (request, _), draft in zip(wanted, drafts, strict=True):
                if draft:
                    own = rows[flying.seats.req_index[request]]
                    self.made.append((list(request.token_ids), own[: len(draft)]))
        return drafts

    def wants(self, decodes):
        return self.random.random() < self.share

    def _choose(self, *args):
        return 0, 3


def drafting(model, share=1.0, **options):
    """An engine whose model always drafts."""
    engine = LLMEngine(model, EngineConfig(**{**OPTIONS, **options}))
    assert engine.model.drafter is not None
    engine.in_flight.speculator = ByModel(engine, share)
    return engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of models with a head, by name."""
    made = {}

    def folder(name):
        if name not in made:
            path = tiny.write_folder(tmp_path_factory.mktemp("model"), name)
            made[name] = write_head(path, Head(name))
        return made[name]

    return folder


@pytest.mark.parametrize("name", NAMES)
def test_drafts_equal_the_heads_own_forward(name, folders):
    model = load(str(folders(name)))
    engine, head = drafting(model), Head(name)
    prompts = tiny.prompts(3, 1, 50, seed=3)  # cut in chunks, and packed beside each other
    tokens = tiny.answers(engine, prompts, tiny.greedy(20, ignore_eos=True))
    assert tokens == tiny.all_alone(name, prompts, 20)
    made = engine.in_flight.speculator.made
    for known, drafts in made:
        assert drafts == head.drafts(model.packed.model, known, len(drafts))
    assert {len(drafts) for _, drafts in made} >= {1, 3}
    assert f"Drafts:    at most 3 a step by the head of {model.name}" in describe(engine)
    assert len(made) > 20


PARAMS = {
    "draws": {"temperature": 0.9},
    "filters": {"temperature": 1.2, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 1},
    "bans": {"temperature": 0.8, "logit_bias": {7: 3.0}, "allowed_token_ids": [*range(40)]},
    "ends": {"temperature": 0, "min_tokens": 15, "stop_token_ids": [*range(0, 96, 3)]},
    "copies": {"temperature": 0.8, "n": 3, "logprobs": 2},
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
def test_no_parameter_changes_a_token(name, params, folders):
    model, prompts = load(str(folders(name))), tiny.prompts(3, 3, 20, seed=6)
    params = SamplingParams(max_tokens=25, seed=5, **params)
    undrafted = LLMEngine(model, EngineConfig(**OPTIONS, speculate="off"))
    plain = tiny.outputs(undrafted, prompts, params)
    engine = drafting(model, share=0.7)
    found = tiny.outputs(engine, prompts, params)
    for a, b in zip(plain, found, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
    assert engine.metrics()["draft_tokens"] > 20


@pytest.mark.parametrize("name", ["llama", "llama/window"])
def test_drafts_are_drawn_with_the_noise_of_the_answer(name, tmp_path):
    """A model that drafts for itself guesses each draw: noise, penalties and bad words agree."""
    path = str(tiny.write_folder(tmp_path, name))
    prompts, model = tiny.prompts(2, 5, 20, seed=6), load(path)
    params = SamplingParams(
        max_tokens=40, temperature=0.9, seed=5, frequency_penalty=0.7, ignore_eos=True
    )
    undrafted = LLMEngine(model, EngineConfig(**OPTIONS, speculate="off"))
    plain = tiny.answers(undrafted, prompts, params)
    engine = drafting(model, draft_model=path)
    assert tiny.answers(engine, prompts, params) == plain
    metrics = engine.metrics()
    assert metrics["accepted_tokens"] > 0.95 * metrics["draft_tokens"] > 40
    assert metrics["steps"] < 20


@pytest.mark.parametrize("vocab_size", [97, 133])
def test_a_draft_model_may_have_other_padding_tokens(vocab_size, tmp_path):
    """Models of one tokenizer pad their vocabularies to other sizes."""
    model = load(str(tiny.write_folder(tmp_path / "model", "llama")))
    own = str(tiny.write_folder(tmp_path / "draft", "llama", vocab_size=vocab_size))
    prompts = [[100, 98, *prompt] for prompt in tiny.prompts(2, 5, 20, seed=6)]
    params = SamplingParams(
        max_tokens=30, temperature=0.9, seed=5, presence_penalty=1, logit_bias={5: 2, 99: 1}
    )
    plain = tiny.answers(
        LLMEngine(model, EngineConfig(**OPTIONS, speculate="off")), prompts, params
    )
    engine = drafting(model, draft_model=own)
    assert tiny.answers(engine, prompts, params) == plain
    assert engine.metrics()["draft_tokens"] > 20
    assert max(t for _, drafts in engine.in_flight.speculator.made for t in drafts) < VOCAB


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3", "deepseek_v32/top8", "nemotron_h"])
@pytest.mark.parametrize("seed", range(2))
def test_aborts_preemption_failures_and_prefixes(name, seed, folders):
    """The tokens stay with a pool that is too small, with equal beginnings, and with lost steps."""
    random, model = Random(seed), load(str(folders(name)))
    stem = tiny.prompts(1, 20, 20, seed=8)[0]
    prompts = [stem[: random.randrange(8, 20)] + p for p in tiny.prompts(6, 1, 8, seed=seed)]
    engine = drafting(
        model, share=0.6, num_blocks=9, max_num_seqs=4, block_size=8, max_model_len=70
    )
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, tiny.greedy(28, ignore_eos=True))
    engine.add_request("gone", stem, tiny.greedy(40))
    done, steps, launch = {}, 0, engine.runner.execute

    def lost(*args, **how):
        raise RuntimeError("lost")

    while engine.has_unfinished_requests():
        steps += 1
        if steps == 7:
            engine.abort("gone")
        engine.runner.execute = lost if steps in (5, 11) else launch
        done.update(tiny.step(engine, RuntimeError))
    expected = tiny.all_alone(name, prompts, 28)
    assert [done[str(i)].outputs[0].token_ids for i in range(6)] == expected
    assert engine.metrics()["preemptions"] > 0
    again = drafting(model)
    for _ in range(2):  # the second time behind a cached prefix
        assert tiny.answers(again, prompts, tiny.greedy(28, ignore_eos=True)) == expected
    assert again.metrics()["prefix_cache_hit_tokens"] > 0


@pytest.mark.parametrize(
    "name", ["qwen3_5", "glm4_moe_lite", "mimo", "mimo_v2_flash", "nemotron_h"]
)
def test_kernels_draft_as_the_reference(name, folders):
    model = load(str(folders(name)))
    prompts, params = tiny.prompts(2, 5, 20, seed=2), tiny.greedy(8, ignore_eos=True)
    expected = tiny.answers(drafting(model), prompts, params)
    with installed():
        engine = drafting(model, attention="kernels")
        assert tiny.answers(engine, prompts, params) == expected
    head = Head(name)
    for known, drafts in engine.in_flight.speculator.made:
        assert drafts == head.drafts(model.packed.model, known, len(drafts))


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5"])
def test_drafts_beside_a_request_that_fills_the_context(name, folders, caplog):
    model, long = load(str(folders(name))), tiny.prompts(1, 93, 93, seed=4)[0]
    prompts, lengths = [long, *tiny.prompts(2, 5, 9, seed=2)], [7, 30, 30]
    engine = drafting(model)
    engine.in_flight.speculator._choose = lambda *_: (0, MAX_MODEL_DRAFTS)
    params = [tiny.greedy(length, ignore_eos=True) for length in lengths]
    answers = tiny.answers(engine, prompts, params)
    for prompt, found, length in zip(prompts, answers, lengths, strict=True):
        assert found == tiny.all_alone(name, [prompt], length)[0]
    assert not caplog.records


def test_the_drafter_rests_while_none_of_its_drafts_pay(folders):
    model = load(str(folders("glm4_moe")))
    engine = drafting(model, share=0.0)  # each decode is launched ahead
    drafter, followed = engine.runner.drafter, []
    follow = drafter.follow
    drafter.follow = lambda *args: followed.append(1) or follow(*args)
    prompts = tiny.prompts(1, 5, 5, seed=2)
    answers = tiny.answers(engine, prompts, tiny.greedy(90, ignore_eos=True))
    assert answers == tiny.all_alone("glm4_moe", prompts, 90)
    assert 16 < len(followed) < 24 < 80 < engine.metrics()["steps"]
    engine.in_flight.speculator.share = 1.0  # drafts begin again
    assert tiny.answers(engine, prompts, tiny.greedy(20, ignore_eos=True)) == [answers[0][:20]]
    assert engine.metrics()["draft_tokens"] > 20


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_rows_change_no_token(bits, folders):
    model, prompts = load(str(folders("glm4_moe"))), tiny.prompts(2, 20, 40, seed=4)
    params = tiny.greedy(25, ignore_eos=True)
    undrafted = LLMEngine(model, EngineConfig(**OPTIONS, kv_bits=bits, speculate="off"))
    engine = drafting(model, share=0.8, kv_bits=bits)
    assert tiny.answers(engine, prompts, params) == tiny.answers(undrafted, prompts, params)
    assert engine.metrics()["draft_tokens"] > 20


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
def test_prefixes_from_the_disk_have_the_drafters_rows(name, folders, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Parts, "min_tokens", 8)
    monkeypatch.setattr(reader, "_READ", 1e18)  # reading is preferred, whatever the speed here
    monkeypatch.setattr(reader, "_MIN_ROWS", 8)
    monkeypatch.setattr(Folder, "free_margin", 0)
    model, prompt = load(str(folders(name))), tiny.prompts(1, 60, 60, seed=5)
    made = []
    for _ in range(2):
        engine = drafting(model, prefix_disk_gib=1, block_size=8)
        for _ in range(2):  # a prefix is kept when it is used again
            assert tiny.answers(engine, prompt, tiny.greedy(8)) == tiny.all_alone(name, prompt, 8)
        while engine.rest():
            pass
        engine.prefix_disk.writer.flush()
        made.append(engine.in_flight.speculator.made)
    assert engine.metrics()["prefix_disk_restored_tokens"] >= 48
    assert made[0] == made[1]  # drafts behind restored rows are those behind computed ones


def test_pictures_change_no_token():
    prompts, params = requests("qwen3_5"), tiny.greedy(12, ignore_eos=True)
    plain = tiny.answers(seeing.engine("qwen3_5"), prompts, params)
    model = seeing.model_of("qwen3_5")
    head = tiny.randomize(new_head(model.packed.model, model.config))
    model = attach(model, from_model(head, None, model.config, "a head"))
    with patch("vllm_metal_lite.images.eyes.attach", lambda *_: seeing.eyes_of("qwen3_5")):
        engine = drafting(model, share=0.8, block_size=8, max_num_seqs=8)
    assert tiny.answers(engine, prompts, params) == plain
    assert engine.metrics()["draft_tokens"] > 10


def test_the_pace_counts_plain_steps_between_others_alone(folders):
    """A plain step next to a drafted one is not launched ahead, or launches no step ahead."""
    engine, steps = drafting(load(str(folders("glm4_moe"))), share=0.2), []
    speculator = engine.in_flight.speculator
    record = speculator.record

    def noted(output, accepted, seconds):
        steps.append((output.has_drafts, seconds is not None))
        record(output, accepted, seconds)

    speculator.record = noted
    for seed in range(3):
        tiny.answers(engine, tiny.prompts(1, 5, 5, seed=seed), tiny.greedy(80, ignore_eos=True))
    counted = 0
    for before, (is_drafted, counts), after in zip(steps, steps[1:], steps[2:], strict=False):
        if is_drafted:
            assert counts
        elif counts:
            counted += 1
            assert not before[0]
            assert not after[0]
    assert counted >= 6
