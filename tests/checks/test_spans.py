"""Kernels are checked with pictures whose rows see each other, for the models that have them."""

from dataclasses import replace

import pytest

from tests.support.kernels.broken_machine import miscompile
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.for_model import checks_for
from vllm_metal_lite.checks.run_check import run
from vllm_metal_lite.specs import AttentionShape, KernelUse

pytestmark = pytest.mark.usefixtures("a_gpu")

FULL = AttentionShape(4, 2, 32, 32, mx.float32)
WINDOW = replace(FULL, window=9)
USE = KernelUse((WINDOW, FULL), 16)


@pytest.mark.parametrize(
    ("spans", "seeing"), [("", set()), ("sliding", {WINDOW}), ("all", {WINDOW, FULL})]
)
def test_layers_that_see_pictures_are_checked_with_them(spans, seeing):
    checks = checks_for(replace(USE, spans=spans))
    assert {check.shape for check in checks if check.spans} == seeing
    assert {check.kernel for check in checks if check.spans} <= {"varlen_prefill"}
    assert len(checks) == len(checks_for(USE))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("int(spans[own + 1])", "int(spans[own + 1]) - 1"),
        ("metal::min(from, int(spans[own]))", "from"),  # shows in a window that is not wide
        ("last_in_tile) * 2 + 1]), seq_len)", "last_in_tile) * 2 + 1]), first_position + 2)"),
    ],
)
def test_a_kernel_that_gets_pictures_wrong_is_found_where_there_are_pictures(
    monkeypatch, text, wrong
):
    miscompile(monkeypatch, "varlen_prefill", (text, wrong))
    for spans in ("", "all"):
        checks = checks_for(replace(USE, spans=spans))
        found = [run(check) for check in checks if check.kernel == "varlen_prefill"]
        assert all(result.failure is None for result in found)
        assert all(result.passed for result in found) == (not spans)


@pytest.mark.parametrize("how", [{"window": 50}, {"kv_bits": 4, "window": 5}, {"softcap": 5.0}])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_right_kernels_pass(how, dtype):
    shape = replace(FULL, dtype=dtype, **how)
    [check] = [c for c in checks_for(KernelUse((shape,), 16, spans="all")) if c.spans]
    assert run(check).error < 0.5
