"""Every kernel at the shapes of real models: accepted by the strict front end, and arrays of a
thread live in registers."""

import re
from functools import cache

import pytest

from metal.host.registers import left_in_memory
from metal.host.strict import check
from tests.support.kernels.production_shapes import CHECKS, texts_of
from vllm_metal_lite.kernels import source
from vllm_metal_lite.kernels.registry import REGISTRY

pytest.importorskip("ziglang", reason="clang is needed")


@cache  # several checks have the same text
def faults(text):
    return check(text) + left_in_memory(text)


@pytest.mark.parametrize("name", CHECKS)
def test_no_array_of_a_thread_is_left_in_memory(name):
    texts = texts_of(CHECKS[name])
    assert {kernel: found for kernel, text, _ in texts if (found := faults(text))} == {}
    own = REGISTRY[CHECKS[name].kernel].file
    assert f"metal_lite_{own}" in {text.kernel for text in texts}


KERNELS = sorted(file.stem for file in source.FOLDER.glob("*.metal"))


def test_every_kernel_is_tried():
    tried = {REGISTRY[check.kernel].file for check in CHECKS.values()}
    assert tried == set(KERNELS), "no use in tests/support/kernels/production_shapes.py"


# A text with loops that are not unrolled must be noticed.

ROLLED = """[[kernel]] void rolled(const device float* x, device float* y,
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


# Without pragmas, clang leaves no array of these in memory.
SHORT_LOOPS = {"expert_sum", "gather_rows", "kv_gather", "kv_write"}
WITH_ARRAYS = [k for k in KERNELS if "#pragma unroll" in "".join(source.read(k))]


@pytest.mark.parametrize("kernel", [k for k in WITH_ARRAYS if k not in SHORT_LOOPS])
def test_a_kernel_without_its_pragmas_is_noticed(kernel):
    texts = texts_of(next(check for check in CHECKS.values() if check.kernel == kernel))
    text = next(text for name, text, _ in texts if name == f"metal_lite_{kernel}")
    assert left_in_memory(text.replace("#pragma unroll", "")), f"add {kernel} to SHORT_LOOPS"


# The bounds of unrolled loops.

LOOP = re.compile(r"#pragma unroll\n\s*for \([^;]*;([^;]*);")


def test_no_bound_of_an_unrolled_loop_calls_a_function():
    """A compiler that folds the call only after it unrolls loops would leave this one rolled."""
    for path in sorted([*source.FOLDER.glob("*.metal"), *source.FOLDER.glob("*.h")]):
        loops = LOOP.findall(path.read_text(encoding="utf-8"))
        assert [bound for bound in loops if "::" in bound] == [], path.name


def test_such_a_call_is_found():
    loop = "#pragma unroll\n  for (int j = from; j < metal::min(from + 2, 8); j++) {"
    assert LOOP.findall(loop) == [" j < metal::min(from + 2, 8)"]
