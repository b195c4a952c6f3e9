"""Offsets of more than 2^31 elements, which real tensors have: on memory that is never touched.

Each case has a fault: the same offset in 32 bits, which must show.
"""

import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import pytest

from metal.host import installed, memory
from tests.support.kernels.arrays import floats
from tests.support.kernels.recurrent_cases import given
from tests.support.kernels.table import WRITTEN
from vllm_metal_lite.backend import dtype_name, mx
from vllm_metal_lite.kernels import source
from vllm_metal_lite.kernels.arguments import Columns, RMSNorm, Rope, Scores
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.experts import ExpertWeight, expert_product, plan_experts
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.latent_attention import decode_metadata, latent_attention
from vllm_metal_lite.kernels.latent_write import NewLatents, latent_write
from vllm_metal_lite.kernels.prefill import VarlenMetadata, varlen_prefill
from vllm_metal_lite.kernels.rope_write import NewRows, rope_write
from vllm_metal_lite.kernels.shared_prefix import shared_prefix
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.recurrence.kernels import pack_segments

BEYOND = 1 << 31
BLOCK_SIZE = 16
# Memory whose pages count only when they are touched.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class Far(NamedTuple):
    """A store, the table of a sequence of its last and its first block, its last slot, and the
    elements of K and V."""

    store: LayerStore
    tables: mx.array
    slot: mx.array
    data: tuple[np.ndarray, np.ndarray]


@contextmanager
def huge(*shape: int, dtype: mx.Dtype = mx.float16) -> Iterator[tuple[mx.array, np.ndarray]]:
    """An array of zeros in no memory, and where the host finds its elements.

    As much lies before the array, so that an offset that has become negative finds zeros.
    """
    array = mx.broadcast_to(mx.zeros((), dtype), shape)
    assert array.size > BEYOND
    how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory_of_all = mmap.mmap(-1, 2 * array.size * dtype.size, how)
    of_all = np.frombuffer(memory_of_all, dtype_name(dtype)).reshape(2, *shape)
    elements = memory.elements
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "elements", lambda a: of_all[1] if a is array else elements(a))
        yield array, of_all[1]


def ones(*shape: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.ones(shape, dtype)


def one_segment(slots: int) -> tuple[mx.array, np.ndarray]:
    """A segment of one row; its state is in the last slot."""
    last = np.array([slots - 1], np.int32)
    segments = pack_segments(np.array([0, 1]), last, last, 1)
    return mx.array(segments), segments


@contextmanager
def huge_store(heads: int = 1, bits: int | None = None) -> Iterator[Far]:
    """A store whose last block lies behind 2^31 words of K, and of V; of several heads, behind as
    many rows."""
    dim = 64 if heads == 1 else 8
    spec = LayerSpec(heads, dim, dim, mx.float16, bits=bits)
    rows = spec.k_row, spec.v_row
    of_slot = rows[0].width * rows[0].kept_dtype.size // 4 if heads == 1 else heads
    slots = (BEYOND // of_slot // BLOCK_SIZE + 2) * BLOCK_SIZE
    with ExitStack() as opened:
        made = [huge(slots, heads, row.width, dtype=row.kept_dtype) for row in rows]
        (keys, of_keys), (values, of_values) = map(opened.enter_context, made)
        store = LayerStore(keys, values, new_ticket(), spec, BLOCK_SIZE)
        tables = mx.array([[slots // BLOCK_SIZE - 1, 0]], mx.int32)
        yield Far(store, tables, mx.array([slots - 1], mx.int32), (of_keys, of_values))


def reading(attend: Callable[[Far], mx.array], heads: int = 1) -> Callable[[], None]:
    """A query of ones sees a far block, with keys of a large score, and a near block of zeros."""

    def run() -> None:
        with huge_store(heads) as far:
            far.data[0][-BLOCK_SIZE:], far.data[1][-BLOCK_SIZE:] = 1, 3
            np.testing.assert_array_equal(floats(attend(far)), 3)

    return run


def writing(write: Callable[[Far], object], bits: int | None = None) -> Callable[[], None]:
    """Rows that are not zero are written to the last slot."""

    def run() -> None:
        with huge_store(bits=bits) as far:
            mx.eval(write(far))
            np.testing.assert_array_equal([rows[-1].any() for rows in far.data], True)

    return run


def gathering(bits: int | None) -> Callable[[], None]:
    def run() -> None:
        with huge_store(bits=bits) as far:
            for rows in far.data:
                rows[-1] = 0x3C003C00 if bits else 1  # the scale and the lowest value, both 1
            gathered = kv_gather(far.slot, far.store)
            np.testing.assert_array_equal([floats(rows).all() for rows in gathered[:2]], True)

    return run


def decoding(q: mx.array | NewRows, far: Far, length: int = 32) -> mx.array:
    lens = mx.array([length], mx.int32)
    return paged_decode(q, far.tables, lens, far.store, Scores(9.0), plan=DecodePlan(1, 2))[0]


def of_one_row(far: Far) -> VarlenMetadata:
    return decode_metadata(far.tables, mx.array([32], mx.int32), 1, 1)


def prefix(far: Far) -> mx.array:
    lens = [mx.array([n], mx.int32) for n in (0, 32)]
    return shared_prefix(ones(1, 1, 64), far.tables, *lens, far.store, Scores(1.0), splits=1)[0]


def latents() -> None:
    """The rotary key chooses the far latent."""
    with huge_store() as far:
        far.data[0][-BLOCK_SIZE:], far.data[1][-BLOCK_SIZE:] = 3, 1
        q = mx.zeros((1, 1, 64), mx.float16), ones(1, 1, 64)
        y, _ = latent_attention(*q, of_one_row(far), far.store, scale=1.0)
        np.testing.assert_array_equal(floats(y), 3)


def new_rows() -> NewRows:
    row = ones(1, 3 * 64)
    columns = [Columns(row, 64 * n) for n in range(3)]
    return NewRows(*columns, 1, Rope(64, False, 1e4, 1.0, None), None, None, POSITION)


def new_latents(far: Far) -> list[mx.array]:
    row, norm = ones(1, 3 * 64), RMSNorm(ones(64), 1e-5)
    parts = Columns(row, 0), 64, 1, Columns(row, 64), Columns(row, 128)
    new = NewLatents(*parts, norm, Rope(64, True, 1e4, 1.0, None), POSITION)
    return list(latent_write(new, far.slot, far.store))


def gather() -> None:
    with huge(BEYOND // 2048 + 2, 4096) as (rows, data):  # a word has two elements
        data[-1] = 2
        y = gather_rows(rows, mx.array([len(data) - 1], mx.int32))
    np.testing.assert_array_equal(floats(y), 2)


def expert() -> None:
    """Rows choose the last of many experts.  Experts have few, long rows, so products are small."""
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
    """The gate lies in columns of an array of this width."""
    width = BEYOND // 4 + 64
    with huge(5, width) as (z, data):
        data[4, :64] = 60
        y = gated_rms_norm(ones(5, 64), Columns(z, 0), ones(64), 0.0, dim=64)
    np.testing.assert_array_equal(floats(y)[4], 60)


ROW, POSITION = ones(1, 1, 64), mx.array([5], mx.int32)
CASES = {
    "paged_decode": reading(lambda far: decoding(ones(1, 1, 64), far)),
    "paged_decode/rows": reading(lambda far: decoding(ones(1, 8, 8), far), 8),
    "paged_decode/fused": writing(lambda far: decoding(new_rows(), far, BLOCK_SIZE)),
    "varlen_prefill": reading(
        lambda far: varlen_prefill(ROW, of_one_row(far), far.store, Scores(1.0))[0]
    ),
    "shared_prefix": reading(prefix),
    "latent_attention": latents,
    "kv_write": writing(lambda far: kv_write(ROW, ROW, far.slot, far.store)),
    "kv_write_quantised": writing(lambda far: kv_write(ROW, ROW, far.slot, far.store), 8),
    "kv_gather": gathering(None),
    "kv_gather_quantised": gathering(8),
    "rope_write": writing(lambda far: rope_write(new_rows(), far.slot, far.store)),
    "latent_write": writing(new_latents),
    "gather_rows": gather,
    "expert_gemm": expert,
    "causal_conv": convolution,
    "gated_delta": recurrence,
    "gated_rms_norm": norm,
}
# A kernel, a text of its source, and the same text with an offset of 32 bits.
OF_TILE = "const size_t row = size_t(slots[key])", "const int row = slots[key]"
FAULTS = [
    ("paged_decode", "thread size_t row[UNROLL]", "thread int row[UNROLL]"),
    ("paged_decode/rows", "size_t(block[u]) * BLOCK_SIZE", "block[u] * BLOCK_SIZE"),
    ("paged_decode/fused", "const size_t row = (last_block", "const int row = (last_block"),
    ("varlen_prefill", *OF_TILE),
    ("shared_prefix", *OF_TILE),
    ("latent_attention", *OF_TILE),
    ("kv_write", "size_t(slot) * K_WORDS", "slot * K_WORDS"),
    ("kv_write", "size_t(slot) * V_WORDS", "slot * V_WORDS"),
    ("kv_write_quantised", "size_t(slot) * KV_HEADS + head) * K", "slot * KV_HEADS + head) * K"),
    ("kv_write_quantised", "size_t(slot) * KV_HEADS + head - ", "slot * KV_HEADS + head - "),
    ("kv_gather", "const size_t slot =", "const int slot ="),
    ("kv_gather_quantised", "size_t slot, int key", "int slot, int key"),
    ("rope_write", "const size_t at = size_t(slot)", "const int at = slot"),
    ("latent_write", "size_t(slot) * K_ROW", "slot * K_ROW"),
    ("latent_write", "size_t(slot) * V_ROW", "slot * V_ROW"),
    ("gather_rows", "size_t(index[row]) * WIDTH", "int(index[row]) * int(WIDTH)"),
    ("expert_gemm", "(size_t(expert) * outputs + of)", "(expert * outputs + of)"),
    ("causal_conv", "(size_t(initial) * (K - 1)", "(initial * (K - 1)"),
    ("causal_conv", "size_t(slot) * (K - 1)", "slot * (K - 1)"),
    ("gated_delta", "(size_t(initial) * V_HEADS", "(initial * V_HEADS"),
    ("gated_delta", "(size_t(slot) * V_HEADS", "(slot * V_HEADS"),
    ("gated_rms_norm", "row * Z_WIDTH", "int(row) * Z_WIDTH"),
]


@pytest.mark.parametrize("kernel", CASES)
def test_offsets_have_64_bits(kernel):
    with installed(writable_inputs=WRITTEN):
        CASES[kernel]()


@pytest.mark.parametrize(("kernel", "text", "wrong"), FAULTS)
def test_offsets_of_32_bits_are_noticed(kernel, text, wrong, monkeypatch):
    parts = source.read(kernel.partition("/")[0])
    assert any(text in part for part in parts)
    faulty = tuple(part.replace(text, wrong) for part in parts)
    monkeypatch.setattr(source, "read", lambda _: faulty)
    with installed(writable_inputs=WRITTEN), pytest.raises(AssertionError, match="Mismatch"):
        CASES[kernel]()
