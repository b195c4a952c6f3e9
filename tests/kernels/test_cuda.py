"""A CUDA kernel's text lies in files that another process finds again."""

import re
from pathlib import Path

import pytest

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import cuda


def files(*texts: str) -> list[Path]:
    included = re.findall(r'#include "(.+)"', "".join(cuda.as_files("kernel", *texts)))
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
    assert not list(header.parent.glob("tmp*"))


def test_shapes_are_named_where_mlx_looks_for_them(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    header, body = cuda.as_files("kernel", "", "out[0] = q_shape[0] + q_shape[1] + k_ndim;")
    assert "q_shape" not in header
    assert body.endswith("// k_ndim q_shape\n")


@pytest.mark.parametrize("pairs", [1, 7, 8, 22])
def test_gathers_of_many_pairs_are_split(monkeypatch, pairs):
    """No launch has more pairs than CUDA takes; the numbers are those of one launch."""
    monkeypatch.setattr(cuda, "_MOST_PAIRS", 7)
    words, scales, biases = mx.quantize(mx.random.normal((3, 40, 64)), 32, 4)
    x, indices = mx.random.normal((pairs, 1, 64)), mx.arange(pairs) * 3 // pairs
    how = {"transpose": True, "group_size": 32, "bits": 4, "sorted_indices": True}
    sizes = []

    def gather_qmm(x, *arrays, rhs_indices, **how):
        sizes.append(rhs_indices.size)
        return mx.gather_qmm(x, *arrays, rhs_indices=rhs_indices, **how)

    got = cuda.split_gathers(gather_qmm, x, words, scales, biases, rhs_indices=indices, **how)
    expected = mx.gather_qmm(x, words, scales, biases, rhs_indices=indices, **how)
    assert max(sizes) <= 7
    assert sum(sizes) == pairs
    assert mx.array_equal(got, expected)
