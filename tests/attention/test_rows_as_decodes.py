"""Rows of prompts in small steps, attended to as decodes that share the keys before their chunk, or
in splits of their context, which is read once for all rows of a request."""

from dataclasses import replace

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
from vllm_metal_lite.batch.forward_batch import ForwardBatch
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


def with_drafts(batch: ForwardBatch) -> ForwardBatch:
    """A step with drafts has no decodes, so that its shapes repeat."""
    return replace(batch, num_decodes=0)


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


def prepared(segments, padding=0, drafts=False, **options):
    case = Case(segments)
    attention = KernelAttention(case.store, "gather", case.shapes, **options)
    batch = with_drafts(case.batch) if drafts else case.batch
    return attention.prepare(batch, batch.num_tokens + padding).plan


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


class SplitCase(KernelCase):
    """A step of requests with drafts, which attends in two splits of each context."""

    rows_as_decodes = LIMIT

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.batch = with_drafts(self.batch)

    def run(self, padding=0, **how):
        out = super().run(padding, **how)
        plan = self.attention.prepare(self.batch, self.batch.num_tokens).plan
        assert plan.decodes is None
        assert plan.repeats
        assert set(plan.prompts.splits.values()) == {2}
        return out


# Requests with drafts, and two without.
DRAFTED = [(300, 4), (130, 1), (0, 8), (77, 1)]


@needs_host
@pytest.mark.parametrize("how", [{}, {"window": 90}, {"softcap": 2.0, "window": 5}], ids=str)
@pytest.mark.parametrize("bits", [None, 8])
def test_long_contexts_are_read_once_for_all_rows_of_a_request(monkeypatch, how, bits):
    change_device(monkeypatch, min_split_context=128)
    case = SplitCase(DRAFTED, sinks=True, bits=bits)
    with installed():
        check(case, padding=3, **how)


def test_where_rows_are_decodes_and_where_contexts_are_read_once(monkeypatch):
    change_device(monkeypatch, min_split_context=128)
    assert not prepared([(300, 4)]).decodes
    assert not prepared([(300, 4), (40, 1)], padding=LIMIT - 5, drafts=True).decodes
    assert not prepared([(300, 4)], padding=LIMIT - 3).repeats, "too many rows"
    assert prepared([(100, 4)]).decodes, "too short to be split"
    assert not prepared([(5, 1), (300, 4)]).prompts, "decodes of one launch"
    for kernel in ("split_prefill", "varlen_prefill", "merge_partitions", "shared_prefix"):
        kept = prepared([(300, 4)], failed_kernels=[kernel])
        assert bool(kept.decodes) == (kernel != "shared_prefix")
    change_device(monkeypatch, max_own_keys=0)
    both = prepared([(5, 1), (300, 4)])
    assert (both.num_decodes, set(both.prompts.splits.values())) == (1, {2})


def test_requests_with_drafts_that_share_a_prefix_read_it_once_for_all(monkeypatch):
    change_device(monkeypatch, min_split_context=128, min_saved_for_prompts=256)
    case = Case([(300, 2), (300, 2)])
    attention = KernelAttention(case.store, "gather", case.shapes)
    tables = case.batch.block_tables.copy()
    tables[:, 1, : 288 // BLOCK_SIZE] = tables[:, 0, : 288 // BLOCK_SIZE]
    batch = replace(case.batch, block_tables=tables)
    assert attention.prepare(case.batch, 4).plan.prompts
    plan = attention.prepare(batch, 4).plan
    assert plan.decodes.prefix
    assert not plan.prompts


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
