"""Which attention is used: the self-check, what it remembers, and what happens when it fails."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import tiny_models as tiny

from metal.host import compiler_available, installed
from vllm_metal_lite import backend
from vllm_metal_lite.attention import choose as choosing
from vllm_metal_lite.attention.choose import choose
from vllm_metal_lite.attention.step import AttentionShape
from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.kernels import fusedcheck, measure, selfcheck, source
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.kv.store import LayerSpec, PagedStore

SHAPE = AttentionShape(4, 2, 32, 32, mx.float32)
BFLOAT16 = replace(SHAPE, dtype=mx.bfloat16)
measured_rows = measure.skinny_rows  # which the fixture replaces
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
    monkeypatch.setattr(measure, "skinny_rows", lambda weights: 0)
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
    from vllm_metal_lite.kernels import norm, ops, prefill, products, rope, rows, shared_prefix

    return [
        v
        for m in (norm, ops, prefill, products, rope, rows, shared_prefix)
        for v in vars(m).values()
        if isinstance(v, Kernel)
    ]


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
    from test_kernel_attention import tokens

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


WEIGHTS = [mx.zeros(shape, mx.bfloat16) for shape in ((96, 64), (64, 96), (96, 64))]


def test_products_by_the_kernel_as_far_as_it_is_faster(monkeypatch):
    """Measured once for weights of such shapes; not by those that it does not take."""
    measured = []
    monkeypatch.setattr(selfcheck, "check", lambda *_: [])
    monkeypatch.setattr(fusedcheck, "check", lambda _: [])
    monkeypatch.setattr(measure, "skinny_rows", lambda weights: measured.append(weights) or 16)
    unsuited = [mx.zeros((64, 40), mx.bfloat16), mx.zeros((64, 64))]
    for weights in (WEIGHTS + unsuited, WEIGHTS[::-1]):
        attention, reason = choose("auto", store(), [BFLOAT16], False, weights)
        assert (attention.fuses, attention.skinny_rows) == (True, 16)
        assert reason.endswith("; products of 2 to 16 rows by skinny_gemm")
    assert [[w.shape for w in weights] for weights in measured] == [[(96, 64), (64, 96), (96, 64)]]
    attention, reason = choose("auto", store(), [BFLOAT16], False, unsuited)
    assert attention.skinny_rows == 0
    assert "skinny" not in reason
    assert len(measured) == 1


@needs_compiler
def test_a_miscompiled_skinny_gemm_is_all_that_is_done_without(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "skinny_rows", lambda weights: 64)
    miscompile(monkeypatch, "skinny_gemm")
    with pytest.warns(UserWarning, match="skinny_gemm .* using MLX's own operations"):
        attention, reason = choose("auto", store(), [BFLOAT16], False, WEIGHTS)
    assert (attention.name, attention.fuses, attention.skinny_rows) == ("kernels", True, 0)
    assert "the others right" in reason
    assert "skinny_gemm" not in reason
    assert fusedcheck.failures(SHAPE) == ()  # float32: never used


def test_products_are_timed_where_the_kernel_was_checked_and_is_used(monkeypatch):
    """By weights of a type that attention has; never where fused launches are done without."""
    measured = []
    monkeypatch.setattr(selfcheck, "check", lambda *_: [])
    monkeypatch.setattr(fusedcheck, "failures", lambda _: ())
    monkeypatch.setattr(measure, "skinny_rows", lambda weights: measured.append(weights) or 16)
    halves = [mx.zeros((64, 64), mx.float16)]
    attention, _ = choose("auto", store(), [BFLOAT16], False, halves + WEIGHTS)
    assert attention.skinny_rows == 16
    assert [{w.dtype for w in weights} for weights in measured] == [{mx.bfloat16}]
    assert choose("auto", store(), [BFLOAT16], False, halves)[0].skinny_rows == 0

    wrong = selfcheck.CheckResult("rope_write", BFLOAT16, 0, 1.0, 0.1)
    monkeypatch.setattr(fusedcheck, "failures", lambda _: (wrong,))
    with pytest.warns(UserWarning, match="rope_write"):
        attention, reason = choose("auto", store(), [BFLOAT16], False, WEIGHTS)
    assert (attention.fuses, attention.skinny_rows) == (False, 0)
    assert "skinny" not in reason


def test_products_that_cannot_be_timed_are_mlx_s(monkeypatch):
    """Tried again at the next start."""
    tries = []

    def no_room(weights: list[mx.array]) -> int:
        tries.append(weights)
        raise RuntimeError("[malloc] no room")

    monkeypatch.setattr(selfcheck, "check", lambda *_: [])
    monkeypatch.setattr(fusedcheck, "failures", lambda _: ())
    monkeypatch.setattr(measure, "skinny_rows", no_room)
    for count in (1, 2):
        with pytest.warns(UserWarning, match=r"skinny_gemm .* no room"):
            attention, reason = choose("auto", store(), [BFLOAT16], False, WEIGHTS)
        assert (attention.fuses, attention.skinny_rows, len(tries)) == (True, 0, count)
        assert "skinny" not in reason


def test_products_are_not_timed_on_a_cpu(monkeypatch):
    monkeypatch.setattr(backend, "is_cpu", lambda: True)
    monkeypatch.setattr(measure, "skinny_rows", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(selfcheck, "check", lambda *_: [])
    monkeypatch.setattr(fusedcheck, "check", lambda _: [])
    attention, _ = choose("kernels", store(), [BFLOAT16], False, WEIGHTS)
    assert attention.skinny_rows == 0


# Seconds a product by the kernel; MLX takes 2.  So many rows are the most.
TIMES = [
    ({8: 1, 16: 1, 32: 1, 64: 1}, 64),
    ({8: 1, 16: 1, 32: 2, 64: 1}, 16),
    ({8: 3, 16: 1, 32: 1, 64: 1}, 0),
]


@pytest.mark.parametrize(("times", "most"), TIMES)
def test_the_most_rows_with_which_the_kernel_is_faster(monkeypatch, times, most):
    """Both ways compute the same; the kernel stands still here, MLX's product in its place."""
    rng = np.random.default_rng(0)
    shapes = [(96, 64), (64, 96), (96, 64), (200, 64), (64, 96)]
    weights = [mx.array(rng.standard_normal(s) * 0.1).astype(mx.float16) for s in shapes]
    by_kernel, results = [], []

    def product(x: mx.array, weight: mx.array) -> mx.array:
        by_kernel.append(weight.shape)
        return x @ weight.T

    def seconds(call, rows: dict[int, mx.array], chain: int) -> float:
        by_kernel.clear()
        results.append(call(rows))
        assert {depth: x.shape[1] for depth, x in rows.items()} == {64: 64, 96: 96}
        assert {x.dtype for x in rows.values()} == {mx.float16}
        return times[len(rows[64])] if by_kernel else 2

    monkeypatch.setattr(measure, "skinny_gemm", product)
    monkeypatch.setattr(measure, "seconds_per_call", seconds)
    assert measured_rows(weights) == most
    for ours, theirs in zip(results[::2], results[1::2], strict=True):
        for depth in (64, 96):
            assert mx.array_equal(ours[depth], theirs[depth])
            assert mx.isfinite(ours[depth]).all()


@pytest.mark.parametrize(("most_bytes", "turns"), [(1 << 30, 50), (3 * 2 * 96 * 64 * 2, 3), (1, 1)])
def test_a_chain_of_large_weights_is_short(monkeypatch, most_bytes, turns):
    """100 products, or as many turns of all weights as are read in little time."""
    chains = []
    monkeypatch.setattr(measure, "_CHAIN_BYTES", most_bytes)
    monkeypatch.setattr(
        measure, "seconds_per_call", lambda call, x, chain: chains.append(chain) or 1
    )
    assert measured_rows(WEIGHTS[:2]) == 0
    assert chains == [turns, turns]


def test_some_weights_of_each_usual_shape_are_multiplied(monkeypatch):
    """Of layers, not all alike; not the head, unless nothing comes more than once."""
    layer = [(96, 64), (64, 96)]
    shapes = [(500, 64), *layer, *layer, *layer, (200, 64), (200, 64)]
    weights = [mx.zeros(shape, mx.float16) for shape in shapes]

    def some(limit: int) -> list[tuple[int, ...]]:
        monkeypatch.setattr(measure, "_WEIGHT_BYTES", limit)
        return [weight.shape for weight in measure._some(weights)]

    one_each = [*layer, (200, 64)]
    assert some(1) == one_each
    assert some(2 * (96 + 96 + 200) * 64 + 1) == one_each * 2
    assert some(1 << 30) == [*one_each, *one_each, *layer]
    weights = weights[:3]
    assert some(1 << 30) == shapes[:3]


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
