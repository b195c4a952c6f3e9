"""Offsets of more than 2^31 elements, which real tensors have: on memory that is never touched.

Each case has a fault: the same offset in 32 bits, which must show.
"""

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from metal.host import installed, memory
from tests.support.kernels.arrays import floats
from tests.support.kernels.recurrent_cases import given
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import source
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.columns import Columns
from vllm_metal_lite.kernels.experts import ExpertWeight, expert_product, plan_experts
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.kernels.segments import pack_segments
from vllm_metal_lite.kernels.store import new_ticket

BEYOND = 1 << 31
# Memory that is not counted before a page is touched.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@contextmanager
def huge(*shape: int, dtype: mx.Dtype = mx.float16) -> Iterator[tuple[mx.array, np.ndarray]]:
    """An array of zeros in no memory, and where the host finds its elements.

    As much lies before the array, so that an offset that has become negative finds zeros.
    """
    array = mx.broadcast_to(mx.zeros((), dtype), shape)
    assert array.size > BEYOND
    how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory_of_all = mmap.mmap(-1, 2 * array.size * dtype.size, how)
    of_all = np.frombuffer(memory_of_all, np.float32 if dtype == mx.float32 else np.float16)
    of_all = of_all.reshape(2, *shape)
    elements = memory.elements
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "elements", lambda a: of_all[1] if a is array else elements(a))
        yield array, of_all[1]


def ones(*shape: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.ones(shape, dtype)


def one_segment(slots: int) -> tuple[mx.array, np.ndarray]:
    """One row, whose state is in the last slot."""
    last = np.array([slots - 1], np.int32)
    segments = pack_segments(np.array([0, 1]), last, last, 1)
    return mx.array(segments), segments


def expert() -> None:
    """The last of many experts, with few and long columns, so that little is multiplied."""
    depth = (1 << 17) + 256
    with huge(1024, 16, depth) as (weight, data):
        data[-1] = 0.5
        indices, rows = mx.full((1, 1), 1023, mx.uint32), ones(1, depth) / 4096
        y = expert_product(rows, indices[0], plan_experts(indices, 1024), ExpertWeight(weight))
    np.testing.assert_allclose(floats(y), depth / 8192, 1e-3)


def convolution() -> None:
    slots = BEYOND // (3 * 4096) + 2
    with huge(slots, 3, 4096) as (states, data):
        data[-1] = 2
        segments, plan = one_segment(slots)
        x, where = Columns(ones(1, 4096), 0), (segments, mx.array(plan_conv_tiles(plan)))
        y, _ = causal_conv(x, ones(4096, 4), None, states, *where, new_ticket(), silu=False)
        mx.eval(y)
        np.testing.assert_array_equal(data[-1, :, 0], [2, 2, 1])
    np.testing.assert_array_equal(floats(y), 7)


def recurrence() -> None:
    slots = BEYOND // (8 * 64 * 64) + 2
    with huge(slots, 8, 64, 64, dtype=mx.float32) as (states, data):
        data[-1] = 1
        k, gates = Columns(mx.zeros((1, 8 * 64)), 0), mx.ones((1, 8)) / 2
        q, segments = Columns(mx.ones((1, 8 * 64)), 0), one_segment(slots)[0]
        rows = q, k, k, given(gates, gates)
        y, _ = gated_delta(*rows, states, segments, new_ticket(), num_k_heads=8, max_seqlen=1)
        mx.eval(y)
        np.testing.assert_array_equal(data[-1], 0.5)
    np.testing.assert_array_equal(floats(y), 32)


def norm() -> None:
    """A gate in columns of an array of that width."""
    width = BEYOND // 4 + 64
    with huge(5, width) as (z, data):
        data[4, :64] = 60
        y = gated_rms_norm(ones(5, 64), Columns(z, 0), ones(64), 0.0, dim=64)
    np.testing.assert_array_equal(floats(y)[4], 60)


CASES = {
    "expert_gemm": expert,
    "causal_conv": convolution,
    "gated_delta": recurrence,
    "gated_rms_norm": norm,
}
# Kernel, source text, and the same text with 32 bits.
FAULTS = [
    ("expert_gemm", "(size_t(expert) * outputs + of)", "(expert * outputs + of)"),
    ("causal_conv", "(size_t(initial) * (K - 1)", "(initial * (K - 1)"),
    ("causal_conv", "size_t(slot) * (K - 1)", "slot * (K - 1)"),
    ("gated_delta", "(size_t(initial) * V_HEADS", "(initial * V_HEADS"),
    ("gated_delta", "(size_t(slot) * V_HEADS", "(slot * V_HEADS"),
    ("gated_rms_norm", "row * Z_WIDTH", "int(row) * Z_WIDTH"),
]


@pytest.mark.parametrize("kernel", CASES)
def test_offsets_have_64_bits(kernel):
    with installed(writable_inputs=["states"]):
        CASES[kernel]()


@pytest.mark.parametrize(("kernel", "text", "wrong"), FAULTS)
def test_offsets_of_32_bits_are_noticed(kernel, text, wrong, monkeypatch):
    header, body = source.read(kernel)
    assert text in body
    monkeypatch.setattr(source, "read", lambda _: (header, body.replace(text, wrong)))
    with installed(writable_inputs=["states"]), pytest.raises(AssertionError, match="Mismatch"):
        CASES[kernel]()
