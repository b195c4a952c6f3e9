"""The number of instantiations that the checks compile: compiling is most of a first start."""

from collections import Counter
from dataclasses import replace

import pytest

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.for_model import checks_for
from vllm_metal_lite.checks.run_check import run
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.specs import (
    AttentionShape,
    ConvShape,
    ExpertShape,
    KernelUse,
    Quantisation,
    RecurrenceShape,
    RopeShape,
    WeightShape,
)

FULL = AttentionShape(16, 8, 128, 128, mx.bfloat16)
QWEN3 = KernelUse((FULL,), 16, (RopeShape(128, base=1e6, eps=1e-6),), (1024,))


def weights(how: Quantisation | None) -> tuple[WeightShape, ...]:
    return WeightShape(4096, 1024, how), WeightShape(1024, 3072, how)


GEMMA3_SHAPE = AttentionShape(8, 4, 256, 256, mx.bfloat16)
GEMMA3_SHAPES = replace(GEMMA3_SHAPE, window=1024), GEMMA3_SHAPE
GEMMA3_ROPES = RopeShape(256, base=1e4, eps=1e-6), RopeShape(256, base=1e6, eps=1e-6)
GEMMA3 = KernelUse(GEMMA3_SHAPES, 16, GEMMA3_ROPES, (2560,))
CONV = ConvShape(8192, 4, False, True, mx.bfloat16)
DELTA = RecurrenceShape(16, 32, 128, 128, mx.bfloat16)
QWEN35 = KernelUse((), 16, recurrences=(CONV, DELTA))


@pytest.fixture
def instantiations(monkeypatch):
    """The instantiations that launches would compile; the launches are stubs."""
    found = set()

    def launch(self, arrays, template, grid, threadgroup, outputs):
        dtypes = tuple(dtype for _, dtype in outputs)
        small = tuple(a is not None and (a.dtype, a.size < 8) for a in arrays)
        found.add((self.name, small, tuple(template.items()), dtypes))
        return [mx.zeros(*output) for output in outputs]

    monkeypatch.setattr(Kernel, "__call__", launch)
    return found


FOUR, SIX = (weights(Quantisation(bits, 64)) for bits in (4, 6))
# A use, and the most instantiations of some kernels.  Each other kernel has at most two.
# Of paged_decode, and of varlen_prefill: prompts, splits, and prefixes of queries in two forms.
SHARING = {"paged_decode": 7, "varlen_prefill": 4}
MOST = {
    "qwen3": (replace(QWEN3, weights=weights(None)), SHARING),
    "in 4 bits": (replace(QWEN3, weights=FOUR), {**SHARING, "skinny_gemm": 4}),
    "in 4 and 6 bits": (replace(QWEN3, weights=FOUR + SIX), {**SHARING, "skinny_gemm": 8}),
    "not sharing": (replace(QWEN3, shares_prefix=False), {"paged_decode": 4}),
    "KV in 8 bits": (replace(QWEN3, shapes=(replace(FULL, kv_bits=8),)), SHARING),
    "gemma3": (
        replace(GEMMA3, weights=FOUR),
        {"paged_decode": 11, "varlen_prefill": 6, "skinny_gemm": 4},
    ),
    "pictures": (replace(GEMMA3, spans="all"), {"paged_decode": 11, "varlen_prefill": 8}),
    "recurrent": (QWEN35, {}),
}


@pytest.mark.parametrize("name", MOST)
def test_checks_compile_few_instantiations(instantiations, name):
    use, most = MOST[name]
    found = set()
    for check in checks_for(use):
        instantiations.clear()
        assert run(check).failure is None
        assert len(instantiations) <= 4, "isolated.DEADLINE allows a check four"
        found |= instantiations
    counts = Counter(kernel for kernel, *_ in found)
    assert {k: n for k, n in counts.items() if n > most.get(k, 2)} == {}


def test_one_row_of_few_experts_is_checked_with_its_own_text(instantiations):
    """MLX passes fewer than 8 indices and weights in another address space."""
    how = Quantisation(4, 32, "mxfp4")
    experts = ExpertShape(32, 2880, 2880, "clamped_swiglu", True, how, how)
    for check in checks_for(replace(QWEN3, experts=(experts,))):
        run(check)  # the check fails, because a stub chooses the experts
    for kernel, number in ("expert_gemm", 1), ("expert_sum", 1):
        seen = {small[number][1] for name, small, *_ in instantiations if name == kernel}
        assert seen == {True, False}


def test_a_step_of_decodes_is_checked_with_its_own_text(instantiations):
    """Serving loads no tiles of rows where no segment has more than one."""
    for check in checks_for(QWEN35):
        assert run(check).failure is None
    forms = [dict(v) for name, _, v, _ in instantiations if name == "gated_delta"]
    assert {form["TILES"] for form in forms} == {True, False}
