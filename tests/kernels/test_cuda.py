"""A CUDA kernel's text lies in files that another process finds again."""

import re
from pathlib import Path

import pytest

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
