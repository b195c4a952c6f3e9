"""Every kernel has a check, a fault that tools seed, and a fallback: none can be forgotten."""

from importlib import import_module
from pathlib import Path

from tests.support.kernels.broken_machine import KERNELS, MISCOMPILED, all_kernels
from tests.support.kernels.runs import RUN
from tests.support.replay.graph import READERS, WRITERS, WRITES_IF_FUSED
from tools.dev import kernels_table
from tools.prove import break_in_serving as break_kernels_in_serving
from vllm_metal_lite import checks
from vllm_metal_lite.checks import fallbacks
from vllm_metal_lite.kernels.registry import REGISTRY

ROOT = Path(__file__).parents[2]

FILES = {path.stem for path in (ROOT / "metal").glob("*.metal")}


def test_every_kernel_and_every_use_of_one_is_checked():
    uses = {row.name for row in REGISTRY.values() if row.template}
    assert {kernel.name for kernel in all_kernels()} == FILES
    for use in uses:
        text = (ROOT / "metal" / f"{REGISTRY[use].file}.metal").read_text()
        assert all(value in text for value in REGISTRY[use].template)
    assert set(KERNELS) == FILES | uses


def test_tools_break_every_kernel():
    assert set(MISCOMPILED) == set(KERNELS)
    assert break_kernels_in_serving.CASES.keys() == set(KERNELS)


def test_every_kernel_runs_under_the_checker():
    assert {name.partition("/")[0] for name in RUN} == FILES


def test_a_kernel_without_a_fallback_is_replaced_by_the_reference():
    essential = {"kv_write", "kv_write_quantised", "causal_conv", "gated_delta"}
    assert {row.name for row in REGISTRY.values() if row.essential} == essential


def test_every_kernel_that_takes_the_ticket_is_known_to_the_replay():
    taking = {kernel.name for kernel in all_kernels() if "ticket" in kernel.inputs}
    assert taking == WRITERS | WRITES_IF_FUSED | READERS


def test_a_row_names_what_exists():
    for row in REGISTRY.values():
        module, function = row.check.split(".")
        assert callable(getattr(import_module(f"{checks.__name__}.{module}"), function))
        assert not row.timed_against or callable(getattr(fallbacks, row.timed_against))
        assert {row.file, *row.needs} <= REGISTRY.keys()
        assert not any(REGISTRY[needed].needs for needed in row.needs)


def test_the_docs_have_the_rows():
    """Or else run `python -m tools.dev.kernels_table`."""
    assert kernels_table.table() in kernels_table.PATH.read_text(encoding="utf-8")
