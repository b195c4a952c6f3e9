"""The host's report of the lines of a kernel that no run has executed."""

import mlx.core as mx
import pytest

from metal.host import HostKernel, HostOptions, coverage, origin

KERNEL = """\
// A comment with code; x = 1;
template <typename T>
inline T halve(T x) {
  return x / T(2);
}

template <typename T>
inline T never_called(T x) {
  return x + T(1);
}

// --- kernel body ---
uint t = thread_index_in_threadgroup;
if (t < 4) {
  out[t] = halve(a[t]);
} else if (a[t] > 100.0f) {
  out[t] = 1.0f;
} else {
  out[t] = 0.0f;
}
if constexpr (WIDE) {
  out[t] += 2.0f;
}
for (uint i = 0; i < uint(a[0]); i++) {
  out[t] = a[t] > 3.0f
      ? 3.0f
      : 2.0f;
}
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A kernel whose text lies in metal/sample.metal of a folder of its own."""
    folder = tmp_path / "metal"
    folder.mkdir()
    (folder / "sample.metal").write_text(KERNEL)
    (folder / "idle.metal").write_text("out[0] = 1.0f;")
    monkeypatch.setattr(origin, "KERNELS", folder)
    monkeypatch.setattr(coverage, "_watched", {})
    monkeypatch.setenv("METAL_LITE_HOST_COVERAGE", "1")
    monkeypatch.setenv("METAL_LITE_HOST_CACHE", str(tmp_path))
    header, body = KERNEL.split("// --- kernel body ---\n")
    return HostKernel("sample", ["a"], ["out"], source=body, header=header)


def run(kernel, a, wide, checked=False):
    kernel(
        inputs=[a],
        template=[("WIDE", wide)],
        grid=(8, 1, 1),
        threadgroup=(8, 1, 1),
        output_shapes=[(8,)],
        output_dtypes=[mx.float32],
        options=HostOptions(checked=checked),
    )


@pytest.mark.parametrize("checked", [False, True])
def test_lines_not_run(kernel, checked):
    assert coverage.report() == []

    run(kernel, mx.zeros(8), wide=False, checked=checked)
    idle, lines = coverage.report()
    assert idle == "metal/idle.metal: never run"
    assert lines == "metal/sample.metal: lines not run: 9, 17, 22, 24-27"

    run(kernel, mx.array([1.0] + [0.0] * 7), wide=True, checked=checked)
    assert coverage.report()[1] == "metal/sample.metal: lines not run: 9, 17, 26"
