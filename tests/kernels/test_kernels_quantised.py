"""The kernels on stores of 8 and 4 bits a value, executed on the CPU host.

`RowFormat` says what a store holds, in MLX operations: what the kernels write has to be the same
bits, and what they read the values that these stand for.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal.host import compiler_available, installed
from tests.support.kernel_cases import (
    RAGGED,
    STORE,
    TOLERANCE,
    NewRowsCase,
    PagedSequences,
    draw,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import decode
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kv.store import LayerSpec

pytestmark = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")

BITS = (8, 4)
ONE_ROUNDING = {mx.float32: 2.0**-22, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
# (K, V): groups of 32, 64, 40 and 24 values, and unlike ones.
DIMS = [(32, 32), (128, 128), (80, 80), (72, 72), (192, 128)]


@pytest.fixture(scope="module", autouse=True)
def host():
    with installed(writable_inputs=STORE):
        yield


def check(*args, **kwargs) -> None:
    PagedSequences(*args, **kwargs).check()


def random_rows(spec: LayerSpec, count: int) -> list[mx.array]:
    """K and V rows, those of the first head flat and those of the second huge."""
    rng = np.random.default_rng(0)
    rows = [draw(rng, count, spec.num_kv_heads, d) for d in (spec.k_head_dim, spec.v_head_dim)]
    for array in rows:
        array[:, 0] = 0.7
        array[:, 1] *= 1e4
    return [mx.array(a).astype(spec.dtype) for a in rows]


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_kv_write_puts_the_bits_that_pack_gives(dtype, dims, bits, checked):
    spec = LayerSpec(3, *dims, dtype, bits=bits)
    rng = np.random.default_rng(0)
    slots = np.append(rng.permutation(64)[:20], [-1, -1, -7]).astype(np.int32)
    rng.shuffle(slots)
    rows = random_rows(spec, len(slots))
    formats = spec.k_row, spec.v_row
    store = [mx.full((64, 3, row.width), 0xABCD, mx.uint32) for row in formats]
    expected = [np.array(a) for a in store]
    for array, row, new in zip(expected, formats, rows, strict=True):
        array[slots[slots >= 0]] = np.array(row.pack(new))[slots >= 0]
    mx.eval(store, rows)
    with installed(checked=checked, schedule=5, writable_inputs=STORE):
        mx.eval(kv_write(*rows, mx.array(slots), *store, new_token(), spec))
    for got, wanted in zip(store, expected, strict=True):
        np.testing.assert_array_equal(np.array(got), wanted)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dims", [*DIMS, (256, 256), (576, 512)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rope_write_puts_the_bits_that_pack_gives_of_what_it_puts_otherwise(dtype, dims, bits):
    """Heads of several kinds a simdgroup; rows without a slot; nothing else is written."""
    how = {"heads": (12, 3), "dims": dims, "rotated": dims[0] // 4 * 2, "dtype": dtype}
    plain, case = (NewRowsCase([0, 1, 5, 13, 2, 40], **how, bits=b) for b in (None, bits))
    with installed(checked=True, schedule=3, writable_inputs=STORE):
        (q, *rows), (got, *store) = plain.launch(), case.launch()
    assert mx.array_equal(got, q)
    written = mx.array(np.isin(np.arange(len(store[0])), case.slots))[:, None, None]
    formats = case.spec.k_row, case.spec.v_row
    for kept, row, array in zip(store, formats, rows, strict=True):
        packed = mx.where(written, row.pack(array), 0xFFFFFFFF)
        np.testing.assert_array_equal(np.array(kept), np.array(packed))


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_kv_gather_gives_the_values_that_unpack_gives(dtype, dims, bits, checked):
    spec = LayerSpec(3, *dims, dtype, bits=bits)
    formats = spec.k_row, spec.v_row
    store = [row.pack(new) for row, new in zip(formats, random_rows(spec, 64), strict=True)]
    slots = np.random.default_rng(1).integers(0, 64, 74).astype(np.int32)
    mx.eval(store)
    with installed(checked=checked, schedule=5):
        got = kv_gather(mx.array(slots), *store, new_token(), spec)[:2]
    for copy, row, array in zip(got, formats, store, strict=True):
        wanted = row.unpack(array)[mx.array(slots)].swapaxes(0, 1)
        assert copy.dtype == dtype
        largest = mx.abs(wanted).max(axis=-1, keepdims=True)
        # A product and a sum, rounded once or twice, before the result is rounded to its type.
        assert mx.all(mx.abs(copy - wanted) <= ONE_ROUNDING[dtype] * largest)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dims", [*DIMS, (576, 512)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode_at_head_sizes_and_types(dtype, dims, bits):
    check(RAGGED, dim=dims[0], v_dim=dims[1], dtype=dtype, plan=(2, 4), bits=bits)


@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (6, 2), (24, 2)]),
    st.sampled_from([8, 16, 32]),
    st.sampled_from([None, 13]),
    st.none() | st.just(3.0),
    st.booleans(),
    st.sampled_from([(1, 4), (64, 1)]),
    st.sampled_from(BITS),
)
@settings(max_examples=25)
def test_decode_of_random_sequences(
    seq_lens, heads, block_size, window, softcap, sinks, plan, bits
):
    check(seq_lens, heads=heads, block_size=block_size, window=window, softcap=softcap,
          sinks=sinks, plan=plan, bits=bits)  # fmt: skip


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_decode_has_no_race_and_stays_within_bounds(dtype, bits):
    with installed(checked=True, schedule=3):
        check(RAGGED, dtype=dtype, plan=(4, 2), heads=(6, 2), bits=bits, window=9, sinks=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_a_load_is_aligned_in_every_row_and_within_a_group(bits, dtype):
    for dim in range(8, 577, 8):
        row = LayerSpec(1, dim, dim, dtype, bits=bits).k_row
        lanes, width, _ = decode._lanes(*[row.value_words] * 2, *[decode._load_words(row)] * 2)
        assert row.value_words % (lanes * width) == 0
        assert row.width % width == 0
        assert row.group_size * bits // 32 % width == 0
