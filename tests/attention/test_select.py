"""Which attention is used: the self-check, what it remembers, and what happens when it fails."""

import json
import warnings
from dataclasses import replace

import pytest

from metal.host import compiler_available, installed
from tests.support import tiny_models as tiny
from vllm_metal_lite import backend
from vllm_metal_lite.attention import select as choosing
from vllm_metal_lite.attention.select import choose
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import fusedcheck, measure, selfcheck
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.kernels import source
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.specs import AttentionShape

SHAPE = AttentionShape(4, 2, 32, 32, mx.float32)
BFLOAT16 = replace(SHAPE, dtype=mx.bfloat16)
ALL_ROWS = range(1, 65)
needs_compiler = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")

# A compiler that forgets an update of the maximum, and one that misses a key.
MISCOMPILED = {
    "paged_decode": ("m[h] = top;\n    l[h] *= fade;", "l[h] *= fade;"),
    "varlen_prefill": ("metal::exp2(", "metal::exp2(0.9f * "),
    "shared_prefix": ("m + metal::log2(l)", "m + metal::log2(0.9f * l)"),
    "merge_partitions": ("weights[p] *", "weights[0] *"),
    "kv_write": ("if (slot >= 0 && at < V_WORDS)", "if (slot > 40 && at < V_WORDS)"),
    # A fast sine, which does not reduce large angles; a mean over all lanes, idle ones too.
    "rope_write": ("precise::sin(theta)", "precise::sin(theta + 1e-7f * theta)"),
    # A key that no split sees.
    "fused_decode": ("split == splits - 1", "split == splits"),
    "gather_rows": ("size_t(row) * WIDTH", "size_t(row / 2) * WIDTH"),
    "add_rms_norm": ("square / float(DIM)", "square / float(TURNS * THREADS * VEC)"),
    # A sum that the last simdgroup is not in.
    "skinny_gemm": ("s < SIMDGROUPS", "s < SIMDGROUPS - 1"),
}


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch, tmp_path):
    """A machine that seems to have a GPU, on which the CPU host stands in for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choosing.backend, "is_cpu", lambda: False)
    monkeypatch.setattr(backend, "memory_limit", lambda: 1 << 30)
    monkeypatch.setattr(measure, "faster_prefill", lambda shape: "varlen")
    with installed():
        yield


def miscompile(monkeypatch, name: str) -> None:
    original, (text, wrong) = source.read, MISCOMPILED[name]
    name = {"fused_decode": "paged_decode"}.get(name, name)

    def read(which: str) -> tuple[str, str]:
        header, body = original(which)
        if which == name:
            assert text in header + body
            header, body = header.replace(text, wrong), body.replace(text, wrong)
        return header, body

    monkeypatch.setattr(source, "read", read)
    for kernel in kernels():
        monkeypatch.setattr(kernel, "_launchers", {})


def kernels() -> list[Kernel]:
    from vllm_metal_lite.kernels import (
        add_rms_norm,
        cache_ops,
        decode,
        gather_rows,
        prefill,
        rope_write,
        shared_prefix,
        skinny_gemm,
    )

    modules = add_rms_norm, cache_ops, decode, gather_rows, prefill, rope_write, shared_prefix
    return [v for m in (*modules, skinny_gemm) for v in vars(m).values() if isinstance(v, Kernel)]


def store() -> PagedStore:
    return PagedStore([LayerSpec(2, 32, 32, mx.float32)], 4, 8)


@needs_compiler
def test_kernels_that_pass_are_used_and_remembered(monkeypatch, tmp_path):
    attention, reason = choose("auto", store(), [SHAPE])
    assert attention.name == "kernels"
    assert "varlen_prefill" in reason
    (memory,) = tmp_path.rglob("*.json")
    remembered = {f"{SHAPE}, blocks of 8": "varlen", f"{SHAPE}, fused": "right"}
    assert json.loads(memory.read_text()) == remembered
    for module in (selfcheck, fusedcheck):
        monkeypatch.setattr(module, "check", lambda *_: pytest.fail("checked again"))
    assert choose("auto", store(), [SHAPE])[0].name == "kernels"


@needs_compiler
@pytest.mark.parametrize("memory", ["", "[1]", "{"])
def test_a_memory_that_cannot_be_read_is_no_memory(tmp_path, memory):
    choose("auto", store(), [SHAPE])
    (file,) = tmp_path.rglob("*.json")
    file.write_text(memory)
    assert choose("auto", store(), [SHAPE])[0].name == "kernels"


@needs_compiler
@pytest.mark.parametrize("name", ["paged_decode", "merge_partitions", "kv_write"])
def test_a_miscompiled_kernel_gives_way_to_the_reference(monkeypatch, tmp_path, name):
    miscompile(monkeypatch, name)
    with pytest.warns(UserWarning, match=f"{name} .* allowed .* using the reference attention"):
        attention, reason = choose("auto", store(), [SHAPE])
    assert attention.name == "reference"
    assert name in reason
    assert not list(tmp_path.rglob("*.json"))
    with pytest.raises(ConfigError, match=f"attention='kernels' is not possible.*{name}"):
        choose("kernels", store(), [SHAPE])


@needs_compiler
def test_a_miscompiled_varlen_prefill_is_done_without(monkeypatch):
    miscompile(monkeypatch, "varlen_prefill")
    with pytest.warns(UserWarning, match="varlen_prefill .* using MLX's own operations"):
        attention, reason = choose("auto", store(), [SHAPE])
    assert (attention.name, attention.prefill) == ("kernels", "gather")
    assert "SDPA" in reason


@needs_compiler
def test_a_miscompiled_shared_prefix_is_done_without(monkeypatch):
    assert choose("auto", store(), [SHAPE])[0]._shares == [True]
    miscompile(monkeypatch, "shared_prefix")
    with pytest.warns(UserWarning, match="shared_prefix .* using MLX's own operations"):
        attention, _ = choose("auto", store(), [SHAPE])
    assert (attention.name, attention._shares) == ("kernels", [False])


@needs_compiler
def test_an_engine_with_a_miscompiled_kernel_computes_the_right_tokens(monkeypatch):
    from tests.attention.test_paged import tokens

    model, prompts = tiny.packed("llama"), tiny.prompts(3)
    expected, _ = tokens(model, prompts, attention="reference", num_blocks=32)
    miscompile(monkeypatch, "paged_decode")
    with pytest.warns(UserWarning, match="reference attention"):
        got, engine = tokens(model, prompts, attention="auto", num_blocks=32)
    assert engine.runner.attention.name == "reference"
    assert got == expected


@needs_compiler
def test_fused_kernels_that_pass_are_remembered(monkeypatch):
    assert fusedcheck.failures(SHAPE) == ()
    monkeypatch.setattr(fusedcheck, "check", lambda _: pytest.fail("checked again"))
    assert fusedcheck.failures(SHAPE) == ()
    assert fusedcheck.failures(replace(SHAPE, window=8)) == ()


@needs_compiler
@pytest.mark.parametrize("name", ["rope_write", "add_rms_norm", "gather_rows", "fused_decode"])
def test_a_miscompiled_fused_kernel_is_found(monkeypatch, tmp_path, name):
    miscompile(monkeypatch, name)
    (failure,) = fusedcheck.failures(SHAPE)
    assert failure.kernel == name
    assert "blocks of" not in str(failure)
    assert not list(tmp_path.rglob("*.json"))
    with pytest.warns(UserWarning, match=f"{name} .* using MLX's own operations"):
        attention, reason = choose("auto", store(), [SHAPE])
    assert (attention.name, attention.fuses) == ("kernels", False)
    assert "the others right" in reason


@needs_compiler
def test_a_miscompiled_skinny_gemm_is_all_that_is_done_without(monkeypatch):
    miscompile(monkeypatch, "skinny_gemm")
    with pytest.warns(UserWarning, match="skinny_gemm .* using MLX's own operations"):
        attention, reason = choose("auto", store(), [BFLOAT16])
    assert (attention.name, attention.fuses, attention.skinny_rows) == ("kernels", True, range(0))
    assert "the others right" in reason
    assert fusedcheck.failures(SHAPE) == ()  # float32: never used


def test_products_may_go_through_the_kernel_where_it_was_checked_and_is_used(monkeypatch):
    """That is, in 16 bits; never where fused launches are done without."""
    monkeypatch.setattr(selfcheck, "check", lambda *_: [])
    monkeypatch.setattr(fusedcheck, "failures", lambda _: ())
    assert choose("auto", store(), [SHAPE])[0].skinny_rows == range(0)
    assert choose("auto", store(), [SHAPE, BFLOAT16])[0].skinny_rows == ALL_ROWS
    wrong = selfcheck.CheckResult("rope_write", BFLOAT16, 0, 1.0, 0.1)
    monkeypatch.setattr(fusedcheck, "failures", lambda _: (wrong,))
    with pytest.warns(UserWarning, match="rope_write"):
        attention, _ = choose("auto", store(), [BFLOAT16])
    assert (attention.fuses, attention.skinny_rows) == (False, range(0))


def test_shapes_that_no_kernel_serves(monkeypatch):
    odd = AttentionShape(4, 2, 36, 36, mx.float32)
    attention, reason = choose("auto", store(), [odd])
    assert (attention.name, reason) == (
        "reference",
        "head size 36 is not a multiple of 8 up to 576",
    )


def test_a_model_without_attention_needs_no_kernels():
    attention, reason = choose("auto", store(), [])
    assert (attention.name, reason) == ("reference", "no layer of this model attends")


def test_without_a_gpu_the_reference_is_used_without_a_warning(monkeypatch):
    monkeypatch.setattr(choosing.backend, "is_cpu", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("auto", store(), [SHAPE])[0].name == "reference"


# doctor


@pytest.fixture
def few_shapes(monkeypatch):
    monkeypatch.setattr(selfcheck, "full_list", lambda: [(SHAPE, 16)])
    monkeypatch.setattr(fusedcheck, "full_list", lambda: [BFLOAT16])
    monkeypatch.setattr(backend, "describe", lambda: "the CPU host")


@needs_compiler
def test_doctor_on_a_machine_that_is_well(few_shapes, capsys):
    assert main(["doctor", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "paged_decode:     right in 1 checks" in out
    assert "skinny_gemm:      right in 1 checks" in out
    assert "Attention: kernels (every kernel agrees" in out


@needs_compiler
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
