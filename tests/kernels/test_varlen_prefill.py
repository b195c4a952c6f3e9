"""varlen_prefill, executed on the CPU host, against attention by definition in float64.

Largest error measured, of results up to about 4: float32 2e-6, float16 1.4e-3, bfloat16 1.0e-2.  In
the two narrow types the result and the weights are rounded to 2^-11 and 2^-8.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.arrays import TOLERANCE
from tests.support.kernels.attention_cases import AttentionCase, segments_of
from vllm_metal_lite.attention.paged.attention import plan_tiles
from vllm_metal_lite.attention.step_arrays import upload_padded
from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels import prefill
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS
from vllm_metal_lite.kernels.served_shapes import attention_problem
from vllm_metal_lite.specs import AttentionShape

pytestmark = pytest.mark.usefixtures("host_or_gpu")


class Case(AttentionCase):
    def run(self, splits: int = 1) -> np.ndarray:
        tiles = plan_tiles(self.cu_seqlens_q, len(self.q), self.heads[0] // self.heads[1])
        metadata = (self.block_tables, self.cu_seqlens_q, self.seq_lens, tiles)
        arrays = self.queries(), prefill.VarlenMetadata(*map(mx.array, metadata))
        store, spans = self.layer(mx.full(8, 41.0)), None
        if self.spans is not None:
            spans = upload_padded(self.spans, max(len(self.q), MIN_ELEMENTS))
        how = {"splits": splits, "spans": spans}
        out, ticket = prefill.varlen_prefill(*arrays, store, self.scores(), **how)
        assert splits > 1 or ticket.tolist() == [41.0] * 8
        assert ticket.size >= 8
        return self.floats(out)


# Segments of one row, of less than a tile of keys, of whole tiles, after a context, and of more
# than one tile.
RAGGED = [(1, 1), (1, 40), (5, 18), (13, 13), (32, 64), (40, 57)]
VLLM_SHAPES = [[(1, 1328), (5, 18), (129, 463)], [(1, 523), (1, 37), (1, 2011)]]


# Two query heads with two KV heads test the same as four with four.
@pytest.mark.parametrize("segments", VLLM_SHAPES, ids=["mixed", "decodes"])
@pytest.mark.parametrize(
    ("dtype", "heads", "window", "softcap"),
    [
        (mx.float32, (8, 2), 256, None),
        (mx.float32, (5, 1), None, 50.0),
        (mx.float16, (8, 2), 256, 50.0),
        (mx.bfloat16, (2, 2), None, None),
    ],
)
def test_the_shapes_of_vllms_own_test(segments, dtype, heads, window, softcap):
    Case(
        segments, dtype=dtype, heads=heads, window=window, softcap=softcap, dim=128, padding=0
    ).check()


@pytest.mark.parametrize(
    ("dim", "v_dim", "dtype"),
    [(32, 32, mx.float16), (64, 64, mx.bfloat16), (72, 72, mx.float16), (80, 80, mx.float32),
     (96, 96, mx.bfloat16), (112, 112, mx.float16), (128, 64, mx.bfloat16), (192, 64, mx.bfloat16),
     (192, 128, mx.float32), (256, 256, mx.float16), (256, 256, mx.float32)],
)  # fmt: skip
def test_head_dims(dim, v_dim, dtype):
    Case([(1, 40), (40, 57)], dim=dim, v_dim=v_dim, dtype=dtype, heads=(2, 1), window=11).check()


@pytest.mark.parametrize(
    ("dim", "dtype"), [(48, mx.float16), (256, mx.float16), (160, mx.float32), (80, mx.bfloat16)]
)
def test_simdgroups_that_share_rows_give_the_same_bits(dim, dtype, monkeypatch):
    case, got = Case(RAGGED, dim=dim, dtype=dtype), []
    for registers in (0, 1000):
        device = replace(profile(), prefill_registers=registers)
        monkeypatch.setattr(prefill, "profile", lambda device=device: device)
        got.append(case.run())
    np.testing.assert_array_equal(*got)


# Quantisation groups of 32, 64, 40, 24 and 48 values; rows of odd and even numbers of words.
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("dim", "v_dim"), [(32, 64), (80, 72), (96, 96), (128, 128), (192, 128), (256, 256)]
)
def test_quantised_head_dims(dim, v_dim, dtype, bits):
    Case([(1, 40), (40, 57)], dim=dim, v_dim=v_dim, dtype=dtype, heads=(2, 1), bits=bits).check()


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (7, 1), (71, 1)])
def test_any_number_of_query_heads_a_kv_head(heads):
    Case(RAGGED, heads=heads).check()


@pytest.mark.parametrize("block_size", [8, 32])
def test_block_sizes(block_size):
    Case(RAGGED, block_size=block_size).check()


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_window_softcap_and_sinks_together(dtype, bits):
    Case(RAGGED, dtype=dtype, window=7, softcap=2.0, sinks=True, bits=bits, dim=72).check()


# Requests with drafts, and one without, in one step.
DRAFTED = [(4, 300), (1, 77), (8, 130), (17, 17)]


@pytest.mark.parametrize("splits", [2, 8, 64])
@pytest.mark.parametrize(
    "how",
    [{"heads": (8, 2)}, {"window": 40}, {"softcap": 2.0, "sinks": True}, {"bits": 8},
     {"bits": 4, "window": 7, "sinks": True}],
    ids=str,
)  # fmt: skip
def test_rows_of_drafts_in_splits(how, splits):
    Case(DRAFTED, **how).check(splits=splits)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("dim", "v_dim", "bits"), [(64, 64, None), (72, 80, 4), (128, 128, 8), (256, 256, None)]
)
def test_splits_of_head_dims(dim, v_dim, bits, dtype):
    Case(DRAFTED[:2], dim=dim, v_dim=v_dim, dtype=dtype, bits=bits, sinks=True).check(splits=4)


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (71, 1)], ids=str)
def test_splits_of_any_number_of_query_heads_a_kv_head(heads):
    """With one head, a row has fewer sums than a ticket has elements."""
    Case([(1, 40)], heads=heads, padding=0).check(splits=2)
    Case(DRAFTED[:3], heads=heads).check(splits=4)


@given(
    st.lists(segments_of(20, 200), min_size=1, max_size=4),
    st.sampled_from([{}, {"window": 7}, {"softcap": 2.0, "sinks": True}, {"bits": 8}]),
    st.sampled_from([2, 4, 32]),
    st.integers(0, 40),
    st.integers(0, 99),
)
@settings(max_examples=20)
def test_random_segments_in_splits(segments, how, splits, padding, seed):
    Case(segments, padding=padding, seed=seed, **how).check(splits=splits)


def test_a_sink_of_minus_infinity_is_no_sink():
    case = Case(RAGGED, sinks=True, window=7)
    case.sinks[:] = -np.inf
    np.testing.assert_allclose(case.run(), case.expected(), 1e-5, 1e-5)


@given(
    st.lists(segments_of(40, 90), min_size=1, max_size=5),
    st.sampled_from([{}, {"window": 7}, {"softcap": 2.0, "sinks": True}, {"bits": 4},
                     {"bits": 8, "window": 7, "sinks": True}]),
    st.integers(0, 40),
    st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40)
def test_random_segments(segments, how, padding, seed):
    Case(segments, padding=padding, seed=seed, **how).check()


@pytest.mark.parametrize("how", [{}, {"window": 7}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("split", [1, 7, 32, 70])
def test_in_chunks_a_prompt_gives_the_same_bits_as_at_once(split, how):
    whole = Case([(77, 77)], padding=0, **how)
    whole.check_chunks(split, lambda rows, keys: Case([(rows, keys)], **how))


# Text; a picture from a prompt's first row to its last; one that begins with the chunk; one that
# began before it; two with text between, and two without; wider than a tile of keys.
SEEING = [(1, 30), (9, 9), (21, 50), (13, 40), (70, 95), (48, 48)]
SPANS = [(1, 0, 9), (2, 29, 43), (3, 20, 35), (4, 27, 61), (4, 70, 90), (5, 0, 17), (5, 17, 47)]


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("window", [None, 5, 20, 40])
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 32), ((3, 3), 72), ((7, 1), 40)], ids=str)
def test_rows_of_a_picture_see_each_other(heads, dim, window, bits):
    how = {"heads": heads, "dim": dim, "window": window, "bits": bits}
    case, causal = Case(SEEING, spans=SPANS, **how), Case(SEEING, **how)
    case.check()
    # The last row of a picture sees no more than a causal row, unless the window hides its start.
    ends = case.spans[:, 1] - 1
    sees_more = case.positions != ends
    away = np.abs(case.expected() - causal.expected()).max(axis=(1, 2))[: len(ends)]
    assert (away[sees_more] > 1e-3).all()
    assert (away > 1e-3).sum() >= sees_more.sum() > 100


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pictures_with_softcap_and_sinks_in_each_type(dtype):
    Case(SEEING, spans=SPANS, dtype=dtype, window=7, softcap=2.0, sinks=True, dim=72).check()


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("splits", [2, 5])
def test_pictures_in_splits(splits, window):
    Case(SEEING, spans=SPANS, window=window).check(splits=splits)


@pytest.mark.parametrize("dim", [256, 160])
def test_pictures_where_simdgroups_share_rows(dim):
    """Gemma's heads."""
    case = Case(SEEING, spans=SPANS, heads=(2, 1), dim=dim, window=16, dtype=mx.bfloat16)
    assert prefill.partners_of(dim, dim, case.dtype, held=100) == 2
    case.check()


@given(
    st.lists(segments_of(60, 60), min_size=1, max_size=4),
    st.sampled_from([{}, {"window": 3}, {"window": 25}, {"bits": 4}, {"heads": (5, 1)}]),
    st.integers(0, 40),
    st.integers(0, 999),
)
@settings(max_examples=30)
def test_random_pictures(segments, how, padding, seed):
    rng, spans = np.random.default_rng(seed), []
    for segment, (rows, keys) in enumerate(segments):
        ends = np.unique(rng.integers(keys - rows, keys + 1, 5)).tolist()
        spans += [(segment, *pair) for pair in pairwise(ends) if rng.random() < 0.7]
    Case(segments, padding=padding, seed=seed, spans=[*spans, (0, 0, 0)], **how).check()


@pytest.mark.parametrize("how", [{}, {"window": 7}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("split", [9, 44, 60])
def test_chunks_that_end_between_pictures_give_the_same_bits(split, how):
    spans = [(0, 9, 44), (0, 60, 70)]

    def chunk(rows, keys):
        mine = [span for span in spans if span[2] <= keys and span[1] >= keys - rows]
        return Case([(rows, keys)], spans=[*mine, (0, 0, 0)], **how)

    whole = Case([(77, 77)], padding=0, spans=spans, **how)
    whole.check_chunks(split, chunk)


def test_spans_of_text_alone_change_no_bit():
    plain, spans = Case(RAGGED, window=7), Case(RAGGED, window=7, spans=[(0, 0, 0)])
    np.testing.assert_array_equal(plain.run(), spans.run())


def test_a_span_beyond_the_segment_reads_nothing_there():
    """No scheduler makes one.  The store is NaN behind the segment, and the table ends there."""
    case = Case([(9, 9), (5, 12)], spans=[(0, 4, 9)])
    expected = case.expected()
    case.spans[4:9, 1] = 1000
    np.testing.assert_allclose(case.run(), expected, 1e-5, 1e-5)


def test_spans_of_another_shape_are_refused():
    case = Case(RAGGED, spans=[(0, 0, 0)])
    case.spans = case.spans[:, :1]
    with pytest.raises(ValueError, match=r"spans must be \(\d+, 2\) .*int32, not \(\d+, 1\)"):
        case.run()


def test_scores_far_apart_do_not_overflow():
    case = Case(RAGGED, window=7)
    case.q *= 1e4
    assert np.isfinite(case.run()).all()


def test_padded_segments_and_a_batch_of_nothing_but_padding():
    for splits in (1, 4):
        Case([(5, 18), (13, 13)], padding=30).check_padding(splits=splits)


def test_a_head_size_that_matrices_cannot_cover_is_named():
    for dims, named in (((64, 36), "head size 36"), ((264, 64), "head size 264")):
        assert named in attention_problem(AttentionShape(1, 1, *dims, mx.float16), prefill=True)


def test_tiles_of_keys_fit_threadgroup_memory_at_every_head_size():
    for k_dim in range(8, 257, 8):
        for v_dim in range(8, 257, 8):
            for itemsize in (2, 4):
                assert prefill.keys_at_once(k_dim, v_dim, itemsize) in (8, 16, 32)
