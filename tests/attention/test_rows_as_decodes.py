"""Rows of prompts in small steps, attended to as decodes that share the keys before their chunk."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal.host import installed
from tests.support.attention.array_attention import compile_on_cpu
from tests.support.attention.cases import (
    BLOCK_SIZE,
    RAGGED,
    Case,
    KernelCase,
    check,
    expected_pairs,
    make_batch,
)
from tests.support.kernels.device import change_device, checks_find, pad_to_powers_of_two
from tests.support.models import tiny_models as tiny
from vllm_metal_lite import LLMEngine, SamplingParams, backend
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.step_arrays import as_decodes
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.registry import Verdict

needs_host = pytest.mark.skipif(not backend.is_cpu(), reason="for the CPU host")

LIMIT = profile().rows_as_decodes
SEGMENTS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=6)


@given(SEGMENTS)
def test_every_row_sees_what_it_saw(segments):
    batch = make_batch(segments)
    rows = as_decodes(batch)
    rows.validate(int(batch.block_tables.max()) + 1)
    assert rows.positions.tolist() == batch.positions.tolist() == (rows.seq_lens - 1).tolist()
    assert rows.num_decodes == rows.num_segments == batch.num_tokens
    assert expected_pairs(rows, None) == expected_pairs(batch, None)


# Attention


class DecodesCase(KernelCase):
    """All rows as decodes."""

    rows_as_decodes = LIMIT

    def run(self, padding=0, **how):
        out = super().run(padding, **how)
        plan = self.attention.prepare(self.batch, self.batch.num_tokens).plan
        assert plan.prompts is None
        assert plan.num_decodes == self.batch.num_tokens
        self.prefix = plan.decodes.prefix
        return out


@pytest.mark.long
@needs_host
@pytest.mark.parametrize(
    "how", [{}, {"window": 11}, {"softcap": 2.0}, {"window": 5, "softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("segments", [RAGGED[:3] + RAGGED[6:], RAGGED[:4], [(40, 13)]], ids=str)
def test_decodes_prompts_and_chunks(monkeypatch, segments, how):
    change_device(monkeypatch, min_saved_for_prompts=BLOCK_SIZE)
    case = DecodesCase(segments, sinks=True)
    with installed():
        check(case, padding=3, **how)
    # Rows of a chunk share what is before it, and some their own first blocks, if layers see all.
    assert (case.prefix is not None) == ("window" not in how)


@needs_host
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_store(bits):
    with installed():
        check(DecodesCase([(9, 1), (21, 9)], dim=96, v_dim=80, bits=bits), window=11)


def prepared(segments, padding=0):
    case = Case(segments)
    attention = KernelAttention(case.store, "gather", case.shapes)
    return attention.prepare(case.batch, case.batch.num_tokens + padding).plan


def test_only_small_steps(monkeypatch):
    chunk = [(17, 1), (8, 25)]
    assert prepared(chunk).prompts is None
    assert prepared(chunk, padding=LIMIT - 26).prompts is None
    assert prepared(chunk, padding=LIMIT - 25).prompts is not None
    with monkeypatch.context() as patch:
        change_device(patch, rows_as_decodes=0)
        assert prepared(chunk).prompts is not None
    # Rows that would read too much, each for itself; what decodes read does not count.
    keys = sum(range(9, 34))
    change_device(monkeypatch, max_own_keys=keys)
    assert prepared(chunk).prompts is None
    assert prepared([(300, 1), (8, 25)]).prompts is None
    change_device(monkeypatch, max_own_keys=keys - 1)
    assert prepared(chunk).prompts is not None
    change_device(monkeypatch, min_saved_for_prompts=8 // BLOCK_SIZE * BLOCK_SIZE)
    assert prepared(chunk).prompts is None


def test_decodes_alone_are_what_they_were():
    """One launch writes their rows and reads them, and rows of a chunk see each other's."""
    assert prepared([(17, 1), (30, 1)]).fused
    assert not prepared([(17, 1), (0, 2)]).fused


# Whole engines, compiled


def recorded_steps(engine: LLMEngine) -> list:
    """The plans of all steps to come, as attention prepares them."""
    steps, prepare = [], engine.runner.attention.prepare
    engine.runner.attention.prepare = lambda *a: steps.append(prepare(*a)) or steps[-1]
    return steps


@pytest.mark.thorough
@settings(max_examples=12)
@given(st.integers(3, 24), st.integers(0, 3), st.booleans())
def test_compiled_steps_give_the_same_tokens(budget, seed, scored):
    """Through ArrayAttention: chunks beside decodes and alone, of a few sizes; scored prompts."""
    prompts = tiny.prompts(5, 3, 40, seed=seed)
    options = {"max_num_batched_tokens": budget, "block_size": 8}
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0 if scored else None)

    def answers(engine):
        outputs = tiny.outputs(engine, prompts, params)
        entries = [output.prompt_logprobs[1:] for output in outputs if scored]
        scores = [[next(iter(p.values())).logprob for p in entry] for entry in entries]
        return tiny.tokens_of(outputs), scores

    expected, expected_scores = answers(tiny.engine("qwen3", **options))
    with pytest.MonkeyPatch.context() as patch:
        pad_to_powers_of_two(patch)
        change_device(patch, min_saved_for_prompts=8)
        engine = compile_on_cpu(tiny.engine("qwen3", **options))
        steps = recorded_steps(engine)
        got, scores = answers(engine)
    assert got == expected
    for ours, wanted in zip(scores, expected_scores, strict=True):
        np.testing.assert_allclose(ours, wanted, 1e-4, 1e-4)
    assert engine.runner.compiled.reason is None
    assert all(step.plan.prompts is None for step in steps)
    assert any(step.plan.decodes.prefix for step in steps)
    assert engine.metrics()["compiled_steps"] > 0


@pytest.mark.long
def test_a_prompt_alone_waits_to_be_compiled():
    """A chunk is less likely than a decode to be followed by a step of the same shape."""
    with pytest.MonkeyPatch.context() as patch:
        pad_to_powers_of_two(patch)
        engine = compile_on_cpu(tiny.engine("qwen3"))
        compiled = []
        for prompt in tiny.prompts(3, 20, 30, seed=1):
            tiny.answers(engine, [prompt], 1)
            compiled.append(engine.metrics()["compiled_steps"])
    assert compiled == [0, 1, 2]


@needs_host
@pytest.mark.parametrize(
    "name",
    ["qwen3", *(pytest.param(n, marks=pytest.mark.long) for n in ("gemma2", "llama/window"))],
)
def test_tokens_through_kernels(monkeypatch, name):
    """A pool that preempts requests, chunks of unlike size, and a newcomer."""
    checks_find(monkeypatch, Verdict({}, "gather"))
    change_device(monkeypatch, min_saved_for_prompts=8)
    prompts = tiny.prompts(4, 10, 40, seed=7)
    with installed():
        engine = tiny.engine(
            name, attention="kernels", block_size=8, num_blocks=10, max_num_batched_tokens=19
        )
        steps = recorded_steps(engine)
        assert tiny.answers(engine, prompts, 16) == tiny.all_alone(name, prompts, 16)
    assert steps
    assert all(step.plan.prompts is None for step in steps)
    assert engine.metrics()["preemptions"] > 0
