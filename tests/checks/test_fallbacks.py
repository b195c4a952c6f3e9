"""A kernel fails: only that kernel is replaced, and the tokens stay right.

Each kernel is tried with a kind of fault, and each kind with a kernel.  A tool tries all pairs:
`METAL_LITE_DEVICE=cpu python -m tools.prove.break_at_start`.
"""

import re

import pytest

from tests.support.kernels.broken_machine import (
    KINDS,
    at_launch,
    cases,
    command,
    consequence,
    impatient,
)
from tests.support.kernels.device import change_device
from tests.support.kernels.row import EXPERTS, LATENT, PRODUCTS, RECURRENT, USE
from tests.support.kernels.table import TABLE
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.checks import isolated, verdicts
from vllm_metal_lite.checks.verdicts import verify
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.kernels.registry import Verdict

pytestmark = pytest.mark.usefixtures("a_gpu")

CASES = [(kernel, kind) for kernel, row in TABLE.items() for kind in row.faults]


def machine(monkeypatch, kernel, kind):
    monkeypatch.setattr(isolated, "command", lambda: command(kernel, kind, "host"))
    monkeypatch.setattr(isolated, "run_here", lambda *_: pytest.fail("not isolated"))


def test_every_kernel_and_every_kind_is_here():
    assert set(CASES) <= set(cases())
    assert {kernel for kernel, _ in CASES} == TABLE.keys()
    assert {kind for _, kind in CASES} == set(KINDS)


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "kind"), CASES)
def test_only_the_kernel_at_fault_is_replaced(monkeypatch, kernel, kind):
    machine(monkeypatch, kernel, kind)
    with impatient(kernel, kind, 3.0):
        verdict, said = verify(TABLE[kernel].use), consequence(kernel, kind)
    assert verdict.failures.keys() == said.keys(), verdict.failures
    for name, line in verdict.failures.items():
        assert re.match(said[name], line)
    by_gather = kernel == "varlen_prefill" or (kernel == "latent_attention" and kind != "is slow")
    assert verdict.prefill == ("gather" if by_gather else "varlen")


@pytest.mark.parametrize(
    "use",
    [USE, PRODUCTS, EXPERTS, RECURRENT, LATENT],
    ids=["float32", "bfloat16", "experts", "recurrent", "latent"],
)
def test_a_machine_that_is_well(monkeypatch, use):
    monkeypatch.setattr(isolated, "command", lambda: command("none", "is slow", "host"))
    assert verify(use) == Verdict({}, "varlen")


MODELS = {"qwen3": USE, "gemma3_text/w9": USE, "deepseek_v3": LATENT, "qwen3_next": RECURRENT}
PAIRS = [(name, k) for name, use in MODELS.items() for k, row in TABLE.items() if row.use is use]
PAIRS.append(("deepseek_v3", "merge_partitions"))


@pytest.mark.long
@pytest.mark.parametrize(("name", "kernel"), PAIRS)
def test_tokens_without_a_kernel_are_the_reference_s(monkeypatch, kernel, name):
    """The engine computes prompts in chunks, and decodes beside them, in splits and after a shared
    prefix."""
    how = {"rows_as_decodes": TABLE[kernel].serving.few_rows, "min_keys": 8, "small_scores": 0}
    how |= {"max_own_keys": 0, "min_prefix_split_keys": 8, "prefix_fill": 64}
    change_device(monkeypatch, min_saved_tokens=8, min_split_context=16, min_split_keys=8, **how)
    prefill = "gather" if "gather" in kernel else "varlen"
    line = f"{kernel} is off by 2, 0.1 is allowed"
    launched = []
    monkeypatch.setattr(Kernel, "__call__", Kernel.__call__)  # at_launch changes it for good
    at_launch(kernel, lambda: launched.append(kernel))
    prompts = shared_prefix(4)
    expected = answers(name, prompts, attention="reference")
    for failures in ({}, {kernel: line}):
        launched.clear()
        monkeypatch.setattr(verdicts, "verify", lambda _, f=failures: Verdict(f, prefill))
        assert answers(name, prompts, attention="auto") == expected
        assert bool(launched) == (not failures and name not in TABLE[kernel].not_launched_by)


def shared_prefix(count: int) -> list[list[int]]:
    first, *others = tiny.prompts(count, 20, 40)
    return [first, *(first[:16] + prompt for prompt in others)]


def answers(name, prompts, attention) -> list[list[int]]:
    engine = tiny.engine(name, num_blocks=64, max_num_batched_tokens=32, attention=attention)
    return tiny.answers(engine, prompts, 12)
