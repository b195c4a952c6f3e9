"""How the reference attention cuts a step into calls of SDPA."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.attention.cases import expected_pairs, make_batch
from tests.support.kernels.device import change_device
from vllm_metal_lite.attention.sdpa import planner
from vllm_metal_lite.attention.sdpa.calls import joint_gathers
from vllm_metal_lite.attention.sdpa.fused import Unfused
from vllm_metal_lite.attention.sdpa.planner import (
    _LEAST_TILE,
    NEVER,
    HostCall,
    cost,
    places,
    split_packs,
)

ANY = 1 << 40


def plan_calls(batch, window=None, chunk=None, *, fused_rows=ANY, key_grain=1, **device):
    """fused_rows: a layer that MLX does not fuse has this; None: MLX fuses all calls."""
    unfused = None if fused_rows is None else Unfused(1, fused_rows=fused_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_KEY_GRAIN", key_grain)
        change_device(patch, **{"sdpa_tile": ANY, "max_scores": ANY, **device})
        return planner.CallPlanner(batch, 0, window, chunk, unfused).calls()


def visible(call: HostCall, window: int | None) -> np.ndarray:
    """(B, Lq, Lk) bool: what SDPA under this call's mask lets a query see."""
    shape = (*call.q_pos.shape, call.kv_slots.shape[1])
    if call.mask is None:
        return np.ones(shape, bool)
    if call.mask == "causal":
        lower_right = np.tri(shape[1], shape[2], shape[2] - shape[1], dtype=bool)
        return np.broadcast_to(lower_right, shape)
    q_pos, kv_pos = call.q_pos[:, :, None], call.kv_pos[:, None, :]
    out = kv_pos <= q_pos
    if window is not None:
        out &= kv_pos > q_pos - window
    if call.segments is not None:
        out &= call.segments[:, :, None] == call.segments[:, None, :]
    return out


def seen_pairs(calls: list[HostCall], window: int | None) -> dict[int, list[int]]:
    """The slots that each row sees at its first place, which is the one that counts."""
    seen: dict[int, list[int]] = {}
    for g in calls:
        mask = visible(g, window)
        for b in range(len(g.q_rows)):
            for i, row in enumerate(g.q_rows[b].tolist()):
                if row not in seen:
                    seen[row] = g.kv_slots[b][mask[b, i]].tolist()
    return seen


segment = st.tuples(st.integers(0, 30), st.integers(1, 24))
whole = st.tuples(st.just(0), st.integers(1, 24))


@given(
    st.lists(st.one_of(segment, whole), min_size=1, max_size=7),
    st.none() | st.integers(1, 20),
    st.none() | st.integers(1, 20),
    st.sampled_from([1, 3, 8, ANY]),
    st.sampled_from([0, 30, 500, 1 << 20]),
    st.sampled_from([1, 100, ANY]),
    st.sampled_from([1, 16]),
    st.sampled_from([12, ANY, None]),
)
@settings(max_examples=400)
def test_every_row_sees_exactly_what_the_definition_says(
    segments, window, chunk, tile, call_cost, max_scores, key_grain, fused_rows
):
    batch = make_batch(segments)
    if window is not None and window >= int(batch.seq_lens.max()):
        window = None  # as SdpaPlan.step_calls does
    how = {"sdpa_tile": tile, "sdpa_call_cost": call_cost, "max_scores": max_scores}
    calls = plan_calls(batch, window, chunk, key_grain=key_grain, fused_rows=fused_rows, **how)
    seen = seen_pairs(calls, window)
    expected = expected_pairs(batch, window, chunk)
    assert {r: sorted(s) for r, s in seen.items()} == {r: sorted(s) for r, s in expected.items()}
    tiles = [np.unique(rows) for g in calls for rows in g.q_rows]  # padding repeats a row
    computed = np.sort(np.concatenate(tiles))
    assert computed.tolist() == list(range(batch.num_tokens)), "a row is computed twice"
    for g in calls:
        assert (np.diff(g.q_rows, axis=1) >= 0).all()
        assert g.q_rows.shape[1] <= max(tile, 1) or g.segments is not None
        assert (g.kv_pos[:, 0] < NEVER).all()
        assert visible(g, window)[:, :, : g.num_visible].all()
        if fused_rows == ANY:
            assert g.kv_pos.shape[1] % key_grain == 0 or g.segments is not None


@given(
    st.lists(segment, min_size=1, max_size=5),
    st.none() | st.integers(1, 20),
    st.integers(0, 9),
    st.sampled_from([0, 1 << 16]),
)
@settings(max_examples=200)
def test_every_row_has_its_place_in_the_results(segments, window, padding, call_cost):
    batch = make_batch(segments)
    n = batch.num_tokens
    calls = plan_calls(batch, window, sdpa_tile=8, sdpa_call_cost=call_cost)
    rows, place = places(calls, n + padding)
    rows = np.arange(n) if rows is None else rows
    assert rows[np.arange(n) if place is None else place[:n]].tolist() == list(range(n))
    assert place is None or len(place) == n + padding


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 60))
def test_packs_hold_at_most_the_cap_in_order_and_oversized_prompts_are_alone(lengths, cap):
    q_lens = np.array(lengths)
    packs = split_packs(np.arange(len(q_lens)), q_lens, cap)
    assert np.concatenate(packs).tolist() == list(range(len(q_lens)))
    for pack, following in zip(packs, [*packs[1:], None], strict=True):
        rows = q_lens[pack].sum()
        assert rows <= cap or len(pack) == 1
        if following is not None:
            assert rows + q_lens[following[0]] > cap, "split too early"


@pytest.mark.parametrize("call_cost", [0, 1 << 20])
def test_an_oversized_prompt_runs_alone_and_needs_no_mask(call_cost):
    batch = make_batch([(0, 5000), (0, 40), (0, 30)])
    calls = plan_calls(batch, sdpa_call_cost=call_cost)
    (oversized,) = (g for g in calls if 4999 in g.q_rows)
    assert oversized.q_rows.shape == (1, 5000)
    assert oversized.mask == "causal"


def test_prompts_of_unlike_lengths_are_packed_where_calls_are_dear():
    """At a GPU's call cost: one block-diagonal call, not a padded batch four times its size."""
    batch = make_batch([(0, 60), (0, 3), (0, 5), (0, 2)])
    (call,) = plan_calls(batch, sdpa_call_cost=1 << 20)
    assert call.segments is not None
    assert call.q_rows.shape == (1, 70)


@pytest.mark.parametrize("context", [0, 13])
def test_like_segments_share_one_causal_call_without_a_mask(context):
    batch = make_batch([(context, 20)] * 4)
    (call,) = plan_calls(batch, sdpa_call_cost=1000)
    assert call.mask == "causal"
    assert call.q_rows.shape == (4, 20)


def test_decodes_of_equal_context_need_no_mask_at_all():
    (call,) = plan_calls(make_batch([(9, 1)] * 3), sdpa_tile=256, sdpa_call_cost=0)
    assert call.mask is None
    (call,) = plan_calls(make_batch([(20, 1), (30, 1)]), 4, sdpa_tile=256, sdpa_call_cost=0)
    assert call.mask is None, "beyond the window they are equal too"
    assert call.kv_slots.shape == (2, 4)


def test_padding_never_costs_more_than_another_call():
    """A short decode is not padded to a long one's context, unless that is cheap."""
    batch = make_batch([(4000, 1), (3, 1), (3900, 1)])
    calls = plan_calls(batch, sdpa_tile=256, sdpa_call_cost=10_000)
    assert [g.q_rows.ravel().tolist() for g in calls] == [[0, 2], [1]]
    assert len(plan_calls(batch, sdpa_tile=256, sdpa_call_cost=1 << 20)) == 1


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 300), st.integers(1, 9)), min_size=1, max_size=6
    ),
    st.sampled_from([0, 5_000, 1 << 18]),
    st.sampled_from([60, 500, 1 << 20]),
)
def test_batches_cost_no_more_than_calls_of_their_own(kinds, call_cost, max_keys):
    """Each kind (queries, keys before, count) is a run of equal tiles."""
    segments = [(before, queries) for queries, before, count in kinds for _ in range(count)]
    batch = make_batch(segments)
    with pytest.MonkeyPatch.context() as patch:
        change_device(patch, sdpa_tile=ANY, sdpa_call_cost=call_cost, max_gathered_keys=max_keys)
        plan = planner.CallPlanner(batch, 0, None, None, None)
        tiles = plan._tiles(np.arange(len(segments)), ANY)
        found, batches = plan._group_by_shape(tiles)
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(segments)))
        lengths = list(zip(tiles.q_len.tolist(), tiles.kv_end.tolist(), strict=True))
        assert found <= sum(cost(*length) + call_cost for length in lengths)
        padded = [
            len(members) * cost(int(tiles.q_len[members].max()), int(tiles.kv_end[members].max()))
            for members in batches
        ]
        assert found == sum(padded) + len(batches) * call_cost
        for members in batches:
            assert len(members) == 1 or len(members) * tiles.kv_end[members].max() <= max_keys


def test_one_call_gathers_a_bounded_number_of_keys():
    batch = make_batch([(999, 1)] * 300)
    calls = plan_calls(batch, sdpa_tile=256, sdpa_call_cost=1 << 20)
    assert sorted(len(g.kv_slots) for g in calls) == [38, 131, 131]
    assert {g.kv_slots.shape[1] for g in calls} == {1000}


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 600)), min_size=1, max_size=6),
    st.none() | st.integers(1, 400),
    st.integers(1 << 14, 1 << 20),
)
@settings(max_examples=60)
def test_the_scores_of_a_call_are_bounded(segments, window, max_scores):
    """By the limit, except for the smallest tiles."""
    batch = make_batch(segments)
    calls = plan_calls(batch, window, sdpa_call_cost=1 << 21, max_scores=max_scores)
    for g in calls:
        rows, keys = g.q_rows.shape[1], g.kv_slots.shape[1]
        assert g.q_rows.size * keys <= max_scores or (len(g.q_rows) == 1 and rows <= _LEAST_TILE)


@given(
    st.lists(st.one_of(segment, whole), min_size=1, max_size=7),
    st.none() | st.integers(1, 20),
    st.sampled_from([1, 3, ANY]),
    st.sampled_from([0, 30, 1 << 20]),
    st.sampled_from([1, 100, ANY]),
    st.sampled_from([1, 40, 1 << 17]),
    st.sampled_from([1, 16]),
)
@settings(max_examples=200)
def test_every_call_finds_its_keys_in_a_gather_of_bounded_size(
    segments, window, tile, call_cost, max_scores, cap, key_grain
):
    batch = make_batch(segments)
    how = {"sdpa_tile": tile, "sdpa_call_cost": call_cost, "max_scores": max_scores}
    calls = plan_calls(batch, window, key_grain=key_grain, **how)
    gathers, left = joint_gathers(calls, cap), iter(calls)
    read = np.concatenate([g.kv_slots.ravel() for g in calls])
    for slots_at_once, begins in gathers:
        of_gather = [next(left) for _ in begins]
        for call, begin in zip(of_gather, begins, strict=True):
            slots, real = call.kv_slots.ravel(), call.kv_pos.ravel() < NEVER
            gathered = slots_at_once[begin : begin + len(slots)]
            assert gathered[real].tolist() == slots[real].tolist()
            assert len(gathered) == len(slots)
            assert np.isin(gathered, read).all(), "padding is a key that some call reads"
        alone = len(of_gather) == 1 or len({call.span and call.span[0] for call in of_gather}) == 1
        assert len(slots_at_once) <= cap or alone
    assert next(left, None) is None


@pytest.mark.parametrize(("window", "keys"), [(None, 9000 + 600), (400, 400 + 600 - 1)])
def test_the_tiles_of_a_chunk_share_one_copy_of_its_keys(window, keys):
    batch = make_batch([(9000, 600)])
    calls = plan_calls(batch, window, sdpa_call_cost=1 << 21, max_scores=1 << 18)
    assert len(calls) > 1
    [(slots, _)] = joint_gathers(calls, 1 << 17)
    assert len(slots) == keys
    assert places(calls, 600) == (None, None), "rows are in order, and none is copied"
