"""Kernels on MLX's CUDA backend: their text, the files that hold it, and the mended functions."""

import re
from pathlib import Path

import pytest

from metal import cuda
from metal.cuda import mends, translate
from tests.support.run_python import run_python
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.kernels import source
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def on_cuda(monkeypatch, tmp_path):
    """MLX's backend is CUDA.  Functions that `cuda.install` replaces come back after the test."""
    monkeypatch.setattr(backend, "name", lambda: "cuda")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(mx.fast, "metal_kernel", mx.fast.metal_kernel)
    monkeypatch.setattr(mx, "quantized_matmul", mx.quantized_matmul)
    monkeypatch.setattr(mx, "gather_qmm", mx.gather_qmm)


def test_launches_reach_the_cuda_backend(on_cuda, monkeypatch):
    """`mx.fast.metal_kernel` makes CUDA kernels: the names of the arrays stay, the text changes."""
    made = []

    def cuda_kernel(**kernel):
        made.append(kernel)
        return lambda *, inputs, **launch: inputs[:2]

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    matmul = mx.quantized_matmul
    backend._run_kernels_on_cuda()
    x = mx.zeros((2, 64))
    add_rms_norm(x, x, None, 1e-5)
    (kernel,) = made
    assert kernel["name"] == "metal_lite_add_rms_norm"
    assert kernel["input_names"] == ["x", "y", "weight", "y_weight"]
    assert kernel["output_names"] == ["sum", "normed"]
    header, body = (
        Path(re.search(r'#include "(.+)"', kernel[part])[1]).read_text()
        for part in ("header", "source")
    )
    assert (header, body) == translate.to_cuda(*source.read("add_rms_norm"))
    assert mx.quantized_matmul.args == (matmul,)


def test_every_kernel_is_translated():
    """No address space of Metal is left, and no header of Metal's library."""
    for file in source.FOLDER.glob("*.metal"):
        header, body = translate.to_cuda(*source.read(file.stem))
        assert "#include <metal_" not in header
        assert not re.search(r"\bthreadgroup \w+ \w+\[", body), file.name


def test_other_backends_keep_their_functions(monkeypatch):
    monkeypatch.setattr(cuda, "install", None)
    backend._run_kernels_on_cuda()


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_an_installed_package_has_no_kernels_for_cuda(on_cuda, monkeypatch, tmp_path, device):
    monkeypatch.setattr(cuda, "install", None)
    monkeypatch.setattr(backend, "__file__", str(tmp_path / "vllm_metal_lite" / "backend.py"))
    monkeypatch.setenv("METAL_LITE_DEVICE", device)
    if device == "auto":
        backend._run_kernels_on_cuda()
        return
    with pytest.raises(ConfigError, match="needs a checkout of vllm-metal-lite"):
        backend._run_kernels_on_cuda()


@pytest.mark.parametrize("first", ["metal.cuda", "vllm_metal_lite.kernels.findings"])
def test_a_process_finds_the_translation(tmp_path, first):
    """Beside the package, from another folder, and in every order of imports."""
    code = f"""
import mlx.core as mx
mx.default_device = lambda: mx.Device(mx.gpu)
mx.metal.is_available = lambda: False
import {first}
from vllm_metal_lite import backend
assert backend.name() == "cuda"
assert mx.fast.metal_kernel.__module__ == "metal.cuda.translate"
"""
    env = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    run = run_python("-P", "-c", code, cwd=tmp_path, env=env)
    assert run.returncode == 0, run.stderr


def files(*texts: str) -> list[Path]:
    included = re.findall(r'#include "(.+)"', "".join(translate.as_files("kernel", *texts)))
    return [Path(name) for name in included]


@pytest.mark.parametrize("writable", [True, False])
def test_files_are_named_by_what_they_hold(monkeypatch, tmp_path, writable):
    home = tmp_path / "home"
    if not writable:
        home.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    header, body = files("int f();", "out[0] = f();")
    assert (header.read_text(), body.read_text()) == ("int f();", "out[0] = f();")
    assert files("int f();", "out[0] = f();") == [header, body]
    assert files("int f();", "out[1] = f();") != [header, body]
    assert (home in header.parents) is writable
    assert body.read_text() == "out[0] = f();"
    assert {file.suffix for file in header.parent.iterdir()} == {".h", ".inc"}


def test_shapes_are_named_where_mlx_looks_for_them(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    header, body = translate.as_files("kernel", "", "out[0] = q_shape[0] + q_shape[1] + k_ndim;")
    assert "q_shape" not in header
    assert body.endswith("// k_ndim q_shape\n")


@pytest.mark.parametrize("pairs", [1, 7, 8, 22])
def test_gathers_of_many_pairs_are_split(monkeypatch, pairs):
    """No launch has more pairs than CUDA takes; the numbers are those of one launch."""
    monkeypatch.setattr(mends, "_MOST_PAIRS", 7)
    words, scales, biases = mx.quantize(mx.random.normal((3, 40, 64)), 32, 4)
    x, indices = mx.random.normal((pairs, 1, 64)), mx.arange(pairs) * 3 // pairs
    how = {"transpose": True, "group_size": 32, "bits": 4, "sorted_indices": True}
    sizes = []

    def gather_qmm(x, *arrays, rhs_indices, **how):
        sizes.append(rhs_indices.size)
        return mx.gather_qmm(x, *arrays, rhs_indices=rhs_indices, **how)

    got = mends.split_gathers(gather_qmm, x, words, scales, biases, rhs_indices=indices, **how)
    expected = mx.gather_qmm(x, words, scales, biases, rhs_indices=indices, **how)
    assert max(sizes) <= 7
    assert sum(sizes) == pairs
    assert mx.array_equal(got, expected)
