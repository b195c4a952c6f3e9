"""Greedy tokens with a prefix cache are those without, whatever happens; float32.

The oracle is mlx-lm, which runs each request by itself.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from metal.host import installed
from tests.support.engine.fake_engine import StepFailed
from tests.support.engine.poison import poison_states
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.config import PREFILL_POLICIES
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.request import Request

NAMES = ["qwen3_next", "lfm2", "mamba2", "kimi_linear", "rwkv7", "longcat_flash_ngram"]
NAMES += ["gemma3/w9", "gpt_bigcode"]
RECURRENT = (
    "baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "falcon_h1",
    "gear", "gear/softcap", "granitemoehybrid", "jamba", "kimi_k3", "kimi_linear", "lfm2",
    "lfm2-vl", "lfm2_moe", "longcat_flash_ngram", "mamba", "mamba2", "nemotron_h",
    "olmo_hybrid", "plamo2", "prism_hadamard_qwen35", "qwen3_5", "qwen3_5_moe", "qwen3_next",
    "recurrent_gemma", "rwkv7",
)  # fmt: skip
STEMS = tiny.prompts(2, 40, 40, seed=51)
FIND = (Phase.explicit, Phase.generate)  # to shrink an example takes minutes


@dataclass
class Chat:
    """Turns that continue each other's answers; it begins with `head` tokens of a stem.

    n: more than one answer in the first turn.  leaves: steps until the user goes away, or None.
    """

    stem: int
    head: int
    turns: list[tuple[list[int], int]]  # new tokens, max_tokens
    arrival: int
    named: list[float]  # checkpoints, as shares of the prompt
    priority: int
    n: int
    leaves: int | None

    def __post_init__(self) -> None:
        self.prompt, self.turn = STEMS[self.stem][: self.head], 0


CHATS = st.builds(
    Chat,
    stem=st.integers(0, 1),
    head=st.sampled_from([0, 5, 16, 29, 32, 40]),
    turns=st.lists(
        st.tuples(
            st.lists(st.integers(0, 6), min_size=1, max_size=9), st.sampled_from([1, 4, 8, 13, 30])
        ),
        min_size=1,
        max_size=3,
    ),
    arrival=st.integers(0, 12),
    named=st.lists(st.floats(0, 1), max_size=2),
    priority=st.integers(-1, 1),
    n=st.sampled_from([1, 1, 2]),
    leaves=st.none() | st.integers(1, 15),
)


@dataclass
class Trouble:
    """Steps that fail before their launch, or while they are waited for, with their states lost;
    and steps before which the cache is reset."""

    before: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)
    resets: set[int] = field(default_factory=set)


STEPS = st.sets(st.integers(1, 30), max_size=2)
TROUBLES = st.builds(Trouble, STEPS, STEPS, STEPS)
OPTIONS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([9, 11, 60]),
        "max_num_seqs": st.sampled_from([1, 3, 6]),
        "max_num_batched_tokens": st.sampled_from([7, 24, 64]),
        "prefill_policy": st.sampled_from(PREFILL_POLICIES),
    }
)
CHECKPOINTS = st.sampled_from([0, 1, 3, 40])


def with_trouble(engine: LLMEngine, trouble: Trouble, poisoned: bool) -> None:
    """Make steps fail; poisoned: state slots that nobody needs hold NaN when a step begins."""
    execute, finish = engine.runner.execute, engine.in_flight.pipeline.finish
    pool, count, fails = engine.runner.attention.store.states, 0, False

    def execute_or_fail(batch: ForwardBatch, *args: Any) -> Any:
        nonlocal count, fails
        count += 1
        if poisoned and pool.num_slots:
            free = engine.scheduler.kv.states._free
            poison_states(pool, set(range(pool.num_slots)) - set(free))
        if count in trouble.before:
            raise StepFailed
        result = execute(batch, *args)
        if count in trouble.after:
            fails = True
            if poisoned and pool.num_slots:
                written = {*batch.final_slots.tolist(), *batch.checkpoints[:, 2].tolist()}
                poison_states(pool, set(range(pool.num_slots)) - written)
        return result

    def finish_or_fail() -> Any:
        nonlocal fails
        if fails:
            fails = False
            raise StepFailed
        return finish()

    engine.runner.execute, engine.in_flight.pipeline.finish = execute_or_fail, finish_or_fail


def serve(engine: LLMEngine, name: str, chats: list[Chat], trouble: Trouble) -> None:
    """Run all turns of all chats, and compare each answer with mlx-lm's."""
    native, longest = tiny.native(name), engine.max_model_len
    open_turns: dict[str, tuple[Chat, int]] = {}
    waiting = dict(enumerate(map(replace, chats)))
    for step in range(1500):
        for i, chat in list(waiting.items()):
            if chat.arrival <= step:
                del waiting[i]
                new, max_tokens = chat.turns[chat.turn]
                prompt = [*chat.prompt, *new]
                n = chat.n if chat.turn == 0 else 1
                params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, n=n)
                positions = [max(int(share * len(prompt)), 1) for share in chat.named]
                try:
                    how = {"priority": chat.priority, "checkpoints": positions}
                    engine.add_request(str(i), prompt, params, **how)
                    open_turns[str(i)] = chat, step
                except RequestError:  # too long for this pool
                    continue
        if step in trouble.resets:
            engine.reset_prefix_cache()
        done = []
        for request_id, (chat, since) in open_turns.items():
            if chat.leaves is not None and step == since + chat.leaves:
                done += engine.abort(request_id)
        done += tiny.step(engine, StepFailed).values()
        for output in done:
            chat, _ = open_turns.pop(output.request_id)
            prompt, max_tokens = output.prompt_token_ids, chat.turns[chat.turn][1]
            expected = tiny.alone(native, prompt, max_tokens)
            for answer in output.outputs:
                assert answer.token_ids == expected[: len(answer.token_ids)]
                if answer.finish_reason != "abort":
                    assert len(answer.token_ids) == min(max_tokens, longest - len(prompt))
            chat.prompt, chat.turn = [*prompt, *output.outputs[0].token_ids], chat.turn + 1
            if chat.turn < len(chat.turns):
                waiting[int(output.request_id)] = chat
        if not (waiting or open_turns):
            return
    raise AssertionError("requests are left")


def cache_gib(name: str, checkpoints: int) -> float:
    return (checkpoints + 0.5) * tiny.packed(name).state_bytes / 2**30


tried = set()
happened = {"hits": 0, "preemptions": 0, "evicted": 0, "lost": 0}


def talker(stem: int, head: int = 5, **more: Any) -> Chat:
    """A prompt, a long answer, and a second turn."""
    usual = {"arrival": 0, "named": [], "priority": 0, "n": 1, "leaves": None}
    return Chat(stem, head, [([stem], 30), ([6], 4)], **{**usual, **more})


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, phases=FIND)
@example(  # more growth than blocks: the last one is preempted
    chats=[talker(0), talker(1, n=2), talker(0, arrival=3, priority=-1)],
    trouble=Trouble(after={9}),
    options={"num_blocks": 9, "max_num_seqs": 6, "max_num_batched_tokens": 24},
    checkpoints=3,
)
@example(  # the step that leaves the prompt's checkpoint fails
    chats=[talker(0, 32), talker(0, 32, arrival=4)],
    trouble=Trouble(after={1}),
    options={"num_blocks": 60, "max_num_seqs": 6, "max_num_batched_tokens": 64},
    checkpoints=40,
)
@given(
    chats=st.lists(CHATS, min_size=2, max_size=6),
    trouble=TROUBLES,
    options=OPTIONS,
    checkpoints=CHECKPOINTS,
)
def test_tokens_with_the_cache_are_those_without(name, chats, trouble, options, checkpoints):
    tried.add(name)
    engine = tiny.engine(name, state_cache_gib=cache_gib(name, checkpoints), **options)
    with_trouble(engine, trouble, poisoned=True)
    serve(engine, name, chats, trouble)
    metrics = engine.metrics()
    happened["hits"] += metrics["prefix_cache_hit_tokens"] > 0
    happened["preemptions"] += metrics["preemptions"] > 0
    happened["evicted"] += metrics.get("state_checkpoints_evicted", 0) > 0
    happened["lost"] += metrics["prefix_cache_lost_tokens"] > 0
    assert metrics["blocks_owned"] == metrics["requests_waiting"] == 0


def test_the_runs_above_were_not_all_easy():
    if tried != set(NAMES):
        pytest.skip("the property test was not run for every model")
    assert min(happened.values()) >= 4, happened


@settings(max_examples=3, phases=FIND)
@given(chats=st.lists(CHATS, min_size=2, max_size=4), trouble=TROUBLES, options=OPTIONS)
def test_tokens_with_the_cache_are_those_without_by_kernels(chats, trouble, options):
    name = "qwen3_next"
    with installed(writable_inputs=["states"]):
        engine = tiny.engine_with_kernels(name, state_cache_gib=cache_gib(name, 2), **options)
        assert engine.runner.attention.name == "kernels"
        with_trouble(engine, trouble, poisoned=False)
        serve(engine, name, chats, trouble)
    assert engine.metrics()["failed_kernels"] == 0


@pytest.mark.parametrize("name", RECURRENT)
def test_a_second_turn_and_a_fork_start_from_checkpoints(name):
    engine, native = tiny.engine(name), tiny.native(name)
    first = STEMS[0][:20]

    def ask(prompt: list[int], max_tokens: int) -> tuple[int, list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        output = tiny.ask(engine, prompt, params)
        tokens = output.outputs[0].token_ids
        assert tokens == tiny.alone(native, prompt, max_tokens)
        return output.num_cached_tokens, tokens

    cached, answer = ask(first, 8)
    assert cached == 0
    # The last token of an answer is never computed: 20 + 8 - 1 hold three blocks.
    cached, more = ask([*first, *answer, 1, 2], 8)
    assert cached == 24
    assert ask([*first, *answer, 1, 2, *more, 5], 4)[0] == 32
    assert ask([*first[:18], 3, 4, 5], 4)[0] == 16  # the end of the first prompt


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(
    "name", ["qwen3_next", "lfm2", "mamba2", "kimi_linear", "rwkv7", "longcat_flash_ngram"]
)
def test_decodes_leave_the_state_that_a_prompt_leaves(name, kernels):
    if kernels and name not in ("qwen3_next", "lfm2"):
        pytest.skip("the same kernels as qwen3_next")
    tokens = [*STEMS[0][:12]]
    tokens += tiny.alone(tiny.native(name), tokens, 9)
    with installed(writable_inputs=["states"]) if kernels else nullcontext():
        by_decodes = state_after(16, name, kernels, tokens[:12], 9)
        by_prompt = state_after(16, name, kernels, tokens, 1)
    for a, b in zip(by_decodes, by_prompt, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1))


def state_after(
    position: int, name: str, kernels: bool, prompt: list[int], max_tokens: int
) -> list[np.ndarray]:
    """The checkpoint that a request leaves at a position: one array for each of its states."""
    make = tiny.engine_with_kernels if kernels else tiny.engine
    engine = make(name, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    (answer,) = tiny.ask(engine, prompt, params).outputs
    engine.runner.synchronize()
    tokens = [*prompt, *answer.token_ids]
    hit = engine.scheduler.kv.find_prefix(Request("asks", tokens[: position + 1], 1))
    assert hit.num_tokens == position
    return [np.array(a[hit.state_slot]) for a in engine.runner.attention.store.states.arrays]
