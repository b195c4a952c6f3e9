"""What the checks find of kernels, right and miscompiled, and what is remembered of it."""

import json
from dataclasses import replace

import pytest

from metal.host import compiler_available
from tests.support.miscompiled import miscompile, seeming_gpu
from vllm_metal_lite import backend
from vllm_metal_lite.attention.select import Verdict
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import fusedcheck, measure, selfcheck
from vllm_metal_lite.checks.result import CheckResult
from vllm_metal_lite.checks.verdicts import verify
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.specs import AttentionShape

SHAPE = AttentionShape(4, 2, 32, 32, mx.float32)
BFLOAT16 = replace(SHAPE, dtype=mx.bfloat16)

pytestmark = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch, tmp_path):
    with seeming_gpu(monkeypatch, tmp_path):
        yield


def test_kernels_that_pass_are_remembered(monkeypatch, tmp_path):
    assert verify([SHAPE], 8) == Verdict({}, "varlen")
    (memory,) = tmp_path.rglob("*.json")
    remembered = {f"{SHAPE}, blocks of 8": "varlen", f"{SHAPE}, fused": "right"}
    assert json.loads(memory.read_text()) == remembered
    for module in (selfcheck, fusedcheck):
        monkeypatch.setattr(module, "check", lambda *_: pytest.fail("checked again"))
    assert verify([SHAPE], 8) == Verdict({}, "varlen")


def test_fused_kernels_are_checked_once_for_all_windows(monkeypatch):
    verify([SHAPE], 8)
    monkeypatch.setattr(fusedcheck, "check", lambda _: pytest.fail("checked again"))
    assert verify([replace(SHAPE, window=8)], 8).failures == {}


@pytest.mark.parametrize("memory", ["", "[1]", "{"])
def test_a_memory_that_cannot_be_read_is_no_memory(tmp_path, memory):
    verify([SHAPE], 8)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(memory)
    assert verify([SHAPE], 8) == Verdict({}, "varlen")


def test_prompts_of_all_layers_go_the_way_that_serves_them_all(monkeypatch):
    """`gather` if that is faster for one of them."""
    monkeypatch.setattr(selfcheck, "check", lambda *_: [])
    monkeypatch.setattr(fusedcheck, "check", lambda _: [])
    monkeypatch.setattr(measure, "faster_prefill", lambda s: "gather" if s.window else "varlen")
    assert verify([SHAPE], 8).prefill == "varlen"
    assert verify([SHAPE, replace(SHAPE, window=8)], 8).prefill == "gather"


@pytest.mark.parametrize(
    "name", ["paged_decode", "merge_partitions", "kv_write", "varlen_prefill", "shared_prefix"]
)
def test_a_miscompiled_kernel_is_found(monkeypatch, tmp_path, name):
    miscompile(monkeypatch, name)
    verdict = verify([SHAPE], 8)
    assert f"{name} " in verdict.failures[name]
    assert "allowed" in verdict.failures[name]
    assert verdict.prefill == "gather"
    assert not any(f"{SHAPE}, blocks" in file.read_text() for file in tmp_path.rglob("*.json"))


def test_fused_kernels_are_checked_unless_the_reference_is_used_anyway(monkeypatch):
    def failing(kernel):
        monkeypatch.setattr(
            selfcheck, "check", lambda *_: [CheckResult(kernel, SHAPE, 8, 2.0, 0.1)]
        )

    checked = []
    monkeypatch.setattr(fusedcheck, "check", lambda shape: checked.append(shape) or [])
    failing("paged_decode")
    verify([SHAPE], 8)
    assert not checked
    failing("varlen_prefill")
    verify([SHAPE], 8)
    assert checked == [SHAPE]


@pytest.mark.parametrize("name", ["rope_write", "add_rms_norm", "gather_rows", "fused_decode"])
def test_a_miscompiled_fused_kernel_is_found(monkeypatch, tmp_path, name):
    miscompile(monkeypatch, name)
    verdict = verify([SHAPE], 8)
    assert list(verdict.failures) == [name]
    assert "blocks of" not in verdict.failures[name]
    (memory,) = tmp_path.rglob("*.json")
    assert "fused" not in memory.read_text()


def test_a_miscompiled_skinny_gemm_is_found_where_it_is_used(monkeypatch):
    """That is, in 16 bits."""
    miscompile(monkeypatch, "skinny_gemm")
    assert list(verify([BFLOAT16], 8).failures) == ["skinny_gemm"]
    assert verify([SHAPE], 8).failures == {}


# doctor


@pytest.fixture
def few_shapes(monkeypatch):
    monkeypatch.setattr(selfcheck, "full_list", lambda: [(SHAPE, 16)])
    monkeypatch.setattr(fusedcheck, "full_list", lambda: [BFLOAT16])
    monkeypatch.setattr(backend, "describe", lambda: "the CPU host")


def test_doctor_on_a_machine_that_is_well(few_shapes, capsys):
    assert main(["doctor", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "paged_decode:     right in 1 checks" in out
    assert "skinny_gemm:      right in 1 checks" in out
    assert "Attention: kernels (every kernel agrees" in out


def test_doctor_on_a_machine_that_miscompiles(monkeypatch, few_shapes, capsys):
    miscompile(monkeypatch, "paged_decode")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["attention"]["path"] == "reference"
    assert [c["kernel"] for c in report["checks"] if not c["passed"]] == [
        "paged_decode",
        "merge_partitions",
        "shared_prefix",
        "fused_decode",
    ]
