"""Every kernel has a check, launches, faults and a fallback: none can be forgotten.

Each message names the file that lacks the kernel; CONTRIBUTING.md lists all of them.
"""

from pathlib import Path

from tests.support.kernels.broken_machine import all_kernels
from tests.support.kernels.seeded_faults import FAULTS
from tests.support.kernels.table import RUN, TABLE
from tools.dev import kernels_table
from vllm_metal_lite.checks.for_model import check_of, checks_for, timing_of
from vllm_metal_lite.kernels import source
from vllm_metal_lite.kernels.registry import REGISTRY

ROOT = Path(__file__).parents[2]
REGISTRY_FILE = "vllm_metal_lite/kernels/registry.py"
TABLE_FILES = "tests/support/kernels/*_runs.py"

FILES = {path.stem for path in (ROOT / "metal").glob("*.metal")}


def test_every_file_of_metal_has_a_launch_and_a_row():
    rows = {row.name for row in REGISTRY.values() if not row.base}
    assert {kernel.name for kernel in all_kernels()} == FILES, "vllm_metal_lite/kernels/ launches"
    assert rows == FILES, f"{REGISTRY_FILE} has rows for"


def test_a_row_names_what_exists():
    for row in REGISTRY.values():
        assert callable(check_of(row))
        assert not row.timed or callable(timing_of(row))
        text = (ROOT / "metal" / f"{row.file}.metal").read_text(encoding="utf-8")
        assert all(value in text for value in row.template), row.name
        assert {row.file, *row.needs} <= REGISTRY.keys(), row.name
        assert not any(REGISTRY[needed].needs for needed in row.needs), row.name


def test_the_tests_have_each_kernel_and_each_use_that_can_fail_by_itself():
    uses = {row.name for row in REGISTRY.values() if row.template}
    assert TABLE.keys() == FILES | uses, f"{TABLE_FILES} have rows for"
    assert {name.partition("/")[0] for name in RUN} == FILES, f"{TABLE_FILES} run"


def test_a_use_of_the_table_has_a_check_of_the_kernel():
    for kernel, row in TABLE.items():
        checked = {check.kernel for check in checks_for(row.use)}
        module, _ = REGISTRY[kernel].check.split(".")
        where = f"vllm_metal_lite/checks/{module}.py"
        assert kernel in checked, f"`checks` in {where} lacks it, or its `use` in {TABLE_FILES}"


def test_faults_are_seeded_into_every_kernel():
    seeded = {fault.kernel.partition("/")[0] for fault in FAULTS.values()}
    assert seeded == FILES, "tests/support/kernels/seeded_faults.txt has faults of"
    for kernel, row in TABLE.items():
        text = "".join(source.read(REGISTRY[kernel].file))
        assert row.miscompiled[0] in text, f"`miscompiled` of {kernel} in {TABLE_FILES}"


def test_every_kernel_that_takes_the_ticket_is_known_to_the_replay():
    taking = {kernel.name for kernel in all_kernels() if "ticket" in kernel.inputs}
    known = {kernel for kernel, row in TABLE.items() if row.store}
    assert taking == known, f"`store` in {TABLE_FILES}"


def test_the_docs_have_the_rows():
    text = kernels_table.PATH.read_text(encoding="utf-8")
    assert kernels_table.updated(text) == text, "run `python -m tools.dev.kernels_table`"
