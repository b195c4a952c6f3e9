"""ReferenceAttention against attention by definition in float64.

Measured: float32 at most 2e-7, float16 6e-4, bfloat16 5e-3 of the outputs' scale (about 1): in the
two narrow types the result itself is rounded to 2^-11 and 2^-8, and so are the weights and, under a
softcap, the scores.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.attention.cases import (
    BLOCK_SIZE,
    RAGGED,
    TOLERANCE,
    Case,
    begin,
    check,
    make_batch,
)
from tests.support.kernels.device import change_device, pretend_backend
from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import AttentionCall
from vllm_metal_lite.attention.sdpa import execute
from vllm_metal_lite.attention.sdpa.calls import DeviceCall
from vllm_metal_lite.attention.sdpa.fused import Unfused, unfused
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.kv.store import LayerSpec, PagedStore

CALL = AttentionCall(0, Scores(1.0))
shape = st.tuples(st.integers(0, 40), st.integers(1, 20)) | st.tuples(
    st.just(0), st.integers(1, 20)
)


@given(
    st.lists(shape, min_size=1, max_size=5),
    st.none() | st.integers(1, 25),
    st.none() | st.just(2.0),
    st.booleans(),
    st.sampled_from([(4, 4), (4, 2), (6, 2), (4, 1)]),
    st.integers(0, 5),
)
@settings(max_examples=60)
def test_random_segments(segments, window, softcap, sinks, heads, padding):
    case = Case(segments, heads=heads[0], kv_heads=heads[1], dim=16, sinks=sinks)
    check(case, padding, window=window, softcap=softcap)


@pytest.mark.parametrize(
    ("dim", "v_dim"), [(32, 32), (64, 32), (80, 80), (96, 128), (128, 128), (192, 128), (256, 256)]
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_head_dims_and_dtypes(dim, v_dim, dtype):
    check(Case(RAGGED, dim=dim, v_dim=v_dim, dtype=dtype), window=11)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_quantised_store(dtype, bits):
    check(Case(RAGGED, dim=96, v_dim=80, dtype=dtype, bits=bits, sinks=True), window=11)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_softcap_and_sinks_in_narrow_types(dtype):
    check(Case(RAGGED, dtype=dtype, sinks=True), softcap=5.0, window=11)


@pytest.mark.parametrize("where", ["cpu", "cuda", "metal"])
@pytest.mark.parametrize("window", [None, 7])
def test_every_backend_cuts_the_step_its_own_way_to_the_same_result(monkeypatch, where, window):
    pretend_backend(monkeypatch, where)
    if where == "cpu":
        change_device(monkeypatch, sdpa_tile=8)
    check(Case(RAGGED, dim=64), padding=3, window=window)
    check(Case(RAGGED, sinks=True), window=window, softcap=3.0)


def test_the_packed_form_equals_the_padded_one(monkeypatch):
    """The same prompts, concatenated or padded, by the cost of a call."""
    case = Case([(0, 60), (0, 3), (0, 5), (0, 2)])
    results, forms = [], []
    for cost in (1 << 20, 0):
        change_device(monkeypatch, sdpa_call_cost=cost)
        calls = case.attention.prepare(case.batch, 70).plan.step_calls(0, CALL, None).calls
        forms.append([g.host.segments is not None for g in calls])
        results.append(case.run())
    assert forms[0] == [True]
    assert not any(forms[1])
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)
    assert np.abs(results[0] - case.expected()).max() < 1e-5


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("where", ["cpu", "metal", "cuda"])
def test_a_mask_is_never_wider_than_the_queries(monkeypatch, where, dtype):
    """Bool; on CUDA, where a bool mask is not fused, the queries' dtype."""
    pretend_backend(monkeypatch, where)
    case = Case(RAGGED)
    plan = case.attention.prepare(case.batch, case.batch.num_tokens).plan
    calls = plan.step_calls(0, AttentionCall(0, Scores(1.0, window=7)), None).calls
    masks = [m for g in calls if isinstance(m := g.mask(dtype), mx.array)]
    assert {m.dtype for m in masks} == {dtype if where == "cuda" else mx.bool_}


def unfused_call(segment: tuple[int, int], window: int | None = None) -> DeviceCall:
    case = Case([segment])
    step = case.attention.prepare(case.batch, case.batch.num_tokens)
    asked = AttentionCall(0, Scores(1.0, window))
    (call,) = step.plan.step_calls(0, asked, Unfused(heads=4)).calls
    return call


def test_keys_that_every_row_sees_are_not_masked():
    """Of 5 rows behind 40 keys, the first sees 41; the keys are padded to 48."""
    call = unfused_call((40, 5))
    assert call.host.num_visible == 41
    np.testing.assert_array_equal(call.visible[0, 0], np.tri(5, 48 - 41, -1, bool))


def test_all_keys_are_masked_where_the_rows_share_few():
    assert unfused_call((40, 5), window=7).host.num_visible == 0
    assert unfused_call((5, 5)).host.num_visible == 0
    assert unfused_call((0, 30)).host.num_visible == 0


@pytest.mark.parametrize(
    ("where", "dims"), [("metal", [64, 128]), ("cuda", [32, 64, 120, 128]), ("cpu", [])]
)
def test_which_heads_mlx_fuses(monkeypatch, where, dims):
    pretend_backend(monkeypatch, where)
    monkeypatch.setattr(backend, "has_neural_accelerators", lambda: False)
    tried = (32, 64, 120, 128, 192, 256)
    assert [dim for dim in tried if unfused(4, dim, None) is None] == dims
    assert all(unfused(4, dim, 30.0) == Unfused(4) for dim in tried)
    few = unfused(4, 256, None)
    assert [few.fuses(rows, "array") for rows in (1, 8, 9)] == [where != "cpu"] * 2 + [False]


@pytest.mark.parametrize("accelerated", [False, True])
def test_neural_accelerators_fuse_long_causal_calls_of_large_heads(monkeypatch, accelerated):
    """MLX's SDPA gets the segments of 1,024 rows whole; others and a window are not fused."""
    pretend_backend(monkeypatch, "metal")
    monkeypatch.setattr(backend, "has_neural_accelerators", lambda: accelerated)
    change_device(monkeypatch, max_scores=1 << 18)
    fused = []

    def noting(q, *args, **kwargs):
        fused.append((q.shape[2], kwargs["mask"]))
        return mx.fast.scaled_dot_product_attention(q, *args, **kwargs)

    monkeypatch.setattr(execute, "_sdpa", noting)
    case = Case([(3, 1024), (40, 200), (0, 1024), (0, 20)], heads=2, kv_heads=1, dim=256)
    check(case)
    assert fused == ([(1024, "causal")] * 2 if accelerated else [])
    check(case, window=300)
    assert len(fused) == 2 * accelerated


def test_masking_the_last_keys_copies_no_scores():
    """The weights replace the scores, 9 MB; everything else is small."""
    case = Case([(4096, 256)], heads=2, kv_heads=2)
    case.run()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    case.run()
    assert mx.get_peak_memory() - before < 1.7 * (2 * 256 * 4352 * 4)


def one_token_batch(slot: int, num_blocks: int) -> ForwardBatch:
    batch = make_batch([(0, 1)])
    batch.block_tables[:] = slot // BLOCK_SIZE
    batch.validate(num_blocks)
    return batch


@pytest.mark.parametrize("bits", [None, 8])
def test_the_store_is_written_in_place(bits):
    """A step on a store of 256 MiB, or in 8 bits 72, must not copy it."""
    num_blocks, spec = 8192, LayerSpec(4, 128, 128, mx.float32, bits=bits)
    store = PagedStore([spec], num_blocks, BLOCK_SIZE)
    attention = ReferenceAttention(store)
    for slot in (0, 8, 8 * 9):
        step = begin(attention, one_token_batch(slot, num_blocks), 1)
        row = mx.full((1, 4, 128), slot + 1.0)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        step.write(0, row, row)
        out = step.attend(row, CALL)
        mx.eval(out, store.arrays)
        assert mx.get_peak_memory() - before < store.nbytes // 16
        assert mx.array_equal(out, row)
        assert mx.array_equal(spec.k_row.unpack(store.keys[0][slot]), row[0])


def test_rows_of_padding_write_nowhere_that_is_read():
    case = Case(RAGGED)
    before = np.array(case.store.keys[0])
    n = case.batch.num_tokens
    step = begin(case.attention, case.batch, n + 5)
    rows = mx.full((n + 5, 2, 32), float("nan"))
    rows[:n] = case.k[mx.array(case.batch.slot_mapping())]
    step.write(0, rows, rows)
    after = np.array(case.store.keys[0])
    np.testing.assert_array_equal(after[:-1], before[:-1])
    assert np.isnan(after[-1]).all()


def test_scores_far_apart_do_not_overflow():
    case = Case(RAGGED, dim=16)
    case.q = case.q * 1e4
    got = case.run(window=7)
    assert np.isfinite(got).all()
