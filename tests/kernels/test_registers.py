"""Arrays of a thread live in registers, in every kernel, at the shapes of real models."""

import pytest

from metal.host.registers import left_in_memory
from tests.support.production_shapes import CASES, texts_of
from vllm_metal_lite.kernels import source

pytest.importorskip("ziglang", reason="clang is needed")

KERNELS = [source.read(name) for name in source.names()]


@pytest.mark.parametrize("case", CASES)
def test_no_array_of_a_thread_is_left_in_memory(case):
    for kernel, text in texts_of(case):
        assert left_in_memory(text) == [], kernel


def test_every_kernel_is_tried():
    tried = {kernel for case in CASES for kernel, _ in texts_of(case)}
    assert tried == {f"metal_lite_{name}" for name in source.names()}


# A text whose loops are not unrolled must be noticed.

ROLLED = """[[kernel]] void rolled(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
                            uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  const int at = int(thread_position_in_grid.x) * 64;
  thread float held[64];
  PRAGMA
  for (int i = 0; i < 64; i++) {
    held[i] = x[at + i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  PRAGMA
  for (int i = 0; i < 64; i++) {
    y[at + i] = held[63 - i];
  }
}
"""


@pytest.mark.parametrize(
    ("pragma", "left"), [("", ["held: [64 x float]"]), ("#pragma unroll", [])], ids=str
)
def test_a_loop_that_is_left_rolled_is_noticed(pragma, left):
    assert left_in_memory(ROLLED.replace("PRAGMA", pragma)) == left


WITH_ARRAYS = ["paged_decode", "varlen_prefill", "shared_prefix", "rope_write", "add_rms_norm"]


@pytest.mark.parametrize("kernel", [*WITH_ARRAYS, "skinny_gemm", "kv_write_quantised"])
def test_a_kernel_without_its_pragmas_is_noticed(kernel):
    case = next(case for case in CASES if case.startswith(f"{kernel} group 2") or case == kernel)
    text = texts_of(case)[0].text
    assert left_in_memory(text.replace("#pragma unroll", ""))
