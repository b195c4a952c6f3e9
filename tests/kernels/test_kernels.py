"""The kernels that write, copy and decode, executed on the CPU host, against float64 and scatter.

What runs is the source that MLX generates for a Mac.  Every slot that a kernel must not read holds
NaN.  `RowFormat` says, in MLX operations, what a store holds, quantised or not: what the kernels
write has to be the same bits, and what they read the values that these represent.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal.host import installed
from tests.support.kernels.arrays import STORE, TOLERANCE, draw, raw
from tests.support.kernels.attention_cases import RAGGED, PagedSequences
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import decode
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.kernels.merge_partitions import merge_partitions
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.kv.store import LayerSpec

pytestmark = pytest.mark.usefixtures("host")
WRITTEN = STORE

BITS = (None, 8, 4)
ONE_ROUNDING = {mx.float32: 2.0**-22, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
# Head sizes (K, V), whose quantisation groups have 32, 64, 40 and 24 values; the last differ.
DIMS = [(32, 32), (128, 128), (80, 80), (72, 72), (192, 128)]


# Decode


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("window", [None, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)], ids=str)
def test_the_shapes_of_vllms_own_tests(heads, window, softcap, dtype):
    how = {"heads": heads, "window": window, "softcap": softcap, "dtype": dtype, "dim": 128}
    PagedSequences([1328, 18, 463, 523, 37, 2011], plan=(4, 8), **how).check()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "dims", [*DIMS, (64, 64), (96, 96), (112, 112), (192, 192), (256, 256), (576, 512)], ids=str
)
def test_head_sizes_and_types(dims, dtype, bits):
    PagedSequences(RAGGED, dim=dims[0], v_dim=dims[1], dtype=dtype, plan=(2, 4), bits=bits).check()


@pytest.mark.long
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (4, 4), (6, 2), (7, 1), (24, 2)]),
    st.sampled_from([8, 16, 32]),
    st.sampled_from([None, 1, 13]),
    st.none() | st.just(3.0),
    st.booleans(),
    st.sampled_from([(1, 4), (2, 2), (64, 1)]),
    st.sampled_from(BITS),
    st.integers(0, 9),
)
@settings(max_examples=40)
def test_random_sequences(seq_lens, heads, block_size, window, softcap, sinks, plan, bits, seed):
    how = {"sinks": sinks, "plan": plan, "bits": bits, "seed": seed}
    PagedSequences(
        seq_lens, heads=heads, block_size=block_size, window=window, softcap=softcap, **how
    ).check()


def test_rows_of_padding_give_zeros():
    assert not PagedSequences([0, 0, 0], plan=(4, 4), sinks=True).run().any()


def test_scores_far_apart_do_not_overflow():
    case = PagedSequences(RAGGED, plan=(2, 4))
    case.q *= 1e4
    assert np.isfinite(case.run()).all()


@pytest.mark.parametrize("plan", [(1, 4), (4, 2)])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_all_that_hides_keys_together(dtype, bits, plan):
    how = {"window": 9, "softcap": 2.0, "sinks": True, "heads": (6, 2)}
    PagedSequences(RAGGED, dtype=dtype, plan=plan, bits=bits, **how).check()


@pytest.mark.parametrize(("heads", "plan"), [((1, 1), (1, 4)), ((4, 2), (1, 4)), ((2, 1), (2, 2))])
def test_a_ticket_of_few_rows_and_heads_is_written_whole(heads, plan):
    """A ticket has at least 8 elements; here lse is the ticket."""
    PagedSequences([33], heads=heads, plan=plan).check()


# Merging


@given(st.integers(0, 4), st.integers(1, 40), st.integers(0, 9))
@settings(max_examples=30)
def test_merging_parts_is_attending_to_the_whole(empty, splits, seed):
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((3, splits, 5)) * 5
    values = rng.standard_normal((3, splits, 5, 16))
    weights = np.exp2(scores)
    partial = (weights[..., None] * values).sum(2) / weights.sum(2)[..., None]
    lse = np.log2(weights.sum(2))
    keep = np.ones(splits)
    keep[rng.permutation(splits)[:empty]] = 0
    lse[:, keep == 0], partial[:, keep == 0] = -1e30, 0
    total = (weights * keep[:, None]).sum((1, 2))
    expected = (weights[..., None] * values * keep[:, None, None]).sum((1, 2))
    expected = np.divide(expected, total[:, None], where=total[:, None] > 0, out=np.zeros((3, 16)))
    parts = (mx.array(a[None].astype(np.float32)) for a in (partial, lse))
    out = merge_partitions(*parts, mx.float32)
    np.testing.assert_allclose(np.array(out)[0], expected, 1e-5, 1e-5)


# Writing and copying


def random_rows(spec: LayerSpec, count: int) -> list[mx.array]:
    """Rows of K and V: equal values in the first head, huge ones in the second, and a row of nearly
    equal values."""
    rng = np.random.default_rng(0)
    rows = [draw(rng, count, spec.num_kv_heads, d) for d in (spec.k_head_dim, spec.v_head_dim)]
    for array in rows:
        array[:, 0] = 0.7
        array[:, 1] *= 1e4
        array[1, 2] *= 1e-4
    if spec.bits is None:
        rows[0][0, 0, 0], rows[1][1, 1, 1] = np.nan, np.inf
    return [mx.array(a).astype(spec.dtype) for a in rows]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_kv_write_puts_the_bits_that_pack_gives(dtype, dims, bits):
    spec = LayerSpec(3, *dims, dtype, bits=bits)
    rng = np.random.default_rng(0)
    slots = np.append(rng.permutation(64)[:20], [-1, -1, -7]).astype(np.int32)
    rng.shuffle(slots)
    rows = random_rows(spec, len(slots))
    formats = spec.k_row, spec.v_row
    store = [mx.full((64, 3, row.width), 77, row.kept_dtype) for row in formats]
    expected = [raw(a).copy() for a in store]
    for array, row, new in zip(expected, formats, rows, strict=True):
        array[slots[slots >= 0]] = raw(row.pack(new))[slots >= 0]
    mx.eval(store, rows)
    mx.eval(kv_write(*rows, mx.array(slots), LayerStore(*store, new_ticket(), spec)))
    for got, wanted in zip(store, expected, strict=True):
        np.testing.assert_array_equal(raw(got), wanted)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_kv_gather_gives_the_values_that_unpack_gives(dtype, dims, bits):
    spec = LayerSpec(3, *dims, dtype, bits=bits)
    formats = spec.k_row, spec.v_row
    store = [row.pack(new) for row, new in zip(formats, random_rows(spec, 64), strict=True)]
    slots = np.random.default_rng(1).integers(0, 64, 74).astype(np.int32)
    mx.eval(store)
    got = kv_gather(mx.array(slots), LayerStore(*store, new_ticket(), spec))[:2]
    for copy, row, array in zip(got, formats, store, strict=True):
        wanted = row.unpack(array)[mx.array(slots)].swapaxes(0, 1)
        assert copy.dtype == dtype
        if bits is None:
            np.testing.assert_array_equal(raw(copy), raw(wanted))
            continue
        largest = mx.abs(wanted).max(axis=-1, keepdims=True)
        # A product and a sum, rounded once or twice, before the result is rounded to its type.
        assert mx.all(mx.abs(copy - wanted) <= ONE_ROUNDING[dtype] * largest)


@pytest.mark.parametrize("shape", [(8,), (3, 10), (71, 64), (300,)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gather_rows_copies_the_bytes(dtype, shape):
    rng = np.random.default_rng(0)
    rows = mx.array(draw(rng, 20, *shape)).astype(dtype)
    index = rng.integers(0, 20, (2, 13)).astype(np.int32)
    mx.eval(rows)
    got = gather_rows(rows, mx.array(index))
    assert got.shape == (2, 13, *shape)
    np.testing.assert_array_equal(raw(got), raw(rows)[index])


def test_more_rows_than_a_grid_of_cuda_has_in_y(monkeypatch):
    """CUDA allows 65,535 threadgroups in y and z; only x may be longer."""
    grids, launch = [], Kernel.__call__

    def noting(self, arrays, template, grid, *args):
        grids.append(grid)
        return launch(self, arrays, template, grid, *args)

    monkeypatch.setattr(Kernel, "__call__", noting)
    rows = mx.arange(80, dtype=mx.float32).reshape(10, 1, 8)
    index, spec = mx.arange(70_000, dtype=mx.int32) % 10, LayerSpec(1, 8, 8, mx.float32)
    store = LayerStore(rows, -rows, new_ticket(), spec)
    with installed():  # without the checker: there is much to copy
        got = [gather_rows(rows, index), *kv_gather(index, store)[:2]]
        for out, of in zip(got, (rows, rows, -rows), strict=True):
            assert mx.array_equal(out.reshape(-1, 1, 8), of[index])  # one head
    assert [grid[1:] for grid in grids] == [(1, 1)] * 2


@pytest.mark.parametrize(("dtype", "width"), [(mx.float32, 7), (mx.float16, 9)])
def test_rows_that_are_not_whole_words_are_refused(dtype, width):
    with pytest.raises(ValueError, match=f"rows of {width} elements"):
        gather_rows(mx.zeros((4, width), dtype), mx.array([0, 1]))


# What a launch is made of


@pytest.mark.parametrize("size", [2, 4])
def test_lanes_cover_a_row_in_whole_loads(size):
    for dim in range(8, 577, 8):
        words = dim * size // 4
        lanes, k_width, v_width = decode._lanes(words, words)
        assert words % (lanes * k_width) == 0 == words % (lanes * v_width)
        assert lanes in (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_load_is_aligned_in_every_row_and_within_a_group(bits, dtype):
    for dim in range(8, 577, 8):
        row = LayerSpec(1, dim, dim, dtype, bits=bits).k_row
        lanes, width, _ = decode._lanes(*[row.value_words] * 2, *[decode._load_words(row)] * 2)
        assert row.value_words % (lanes * width) == 0
        assert row.width % width == 0
        assert row.group_size * bits // 32 % width == 0
