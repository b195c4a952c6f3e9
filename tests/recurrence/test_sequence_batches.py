"""A step as batches of sequences: which rows they have, and the states between them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.recurrent_steps import (
    KEY,
    Span,
    batch_of,
    bits,
    packed_spans,
    state_store_of,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, SegmentState
from vllm_metal_lite.recurrence.sequence_batches import BatchStates, RowOrder, sequence_batches


@given(step=packed_spans(), alone=st.booleans())
def test_runs_cover_every_row_once_and_a_segments_parts_in_order(step, alone):
    batch = step.batch
    batches = sequence_batches(batch, alone)
    assert [seqs.index for seqs in batches] == list(range(len(batches)))
    covered = np.concatenate([seqs.rows.ravel() for seqs in batches])
    assert sorted(covered.tolist()) == list(range(batch.num_tokens))
    for index, (start, _, slots) in enumerate(step.spans):
        parts = [(seqs, i) for seqs in batches for i, s in enumerate(seqs.segments) if s == index]
        rows = np.concatenate([seqs.rows[i] for seqs, i in parts])
        np.testing.assert_array_equal(rows, np.arange(batch.num_tokens)[step.rows_of(index)])
        ends = [slot for _, slot in slots.checkpoints] + [slots.final]
        assert [seqs.final_slots[i] for seqs, i in parts] == ends
        begins = [
            EMPTY_SLOT if seqs.initial_slots is None else seqs.initial_slots[i] for seqs, i in parts
        ]
        assert begins == [slots.initial, *ends[:-1]]
        assert [seqs.part for seqs, _ in parts] == list(range(len(parts)))
        if alone:
            assert all(len(seqs.segments) == 1 for seqs, _ in parts)
            reached = [start + seqs.rows[i, 0] - rows[0] for seqs, i in parts]
            assert [seqs.start for seqs, _ in parts] == reached


def test_decodes_are_one_run_and_prompts_of_one_length_too():
    spans = [
        *(Span(start, 1, SegmentState(slot, slot)) for slot, start in enumerate((20, 9, 31))),
        *(Span(0, 4, SegmentState(EMPTY_SLOT, slot)) for slot in (3, 4)),
        Span(3, 4, SegmentState(5, 5)),
    ]
    batches = sequence_batches(batch_of(spans))
    assert sorted(len(seqs.segments) for seqs in batches) == [1, 2, 3]
    assert [seqs.initial_slots is None for seqs in batches if len(seqs.segments) == 2] == [True]


@given(step=packed_spans(), inner=st.sampled_from([(), (5,), (3, 5)]), alone=st.booleans())
def test_rows_become_sequences_and_sequences_rows(step, inner, alone):
    batches = sequence_batches(step.batch, alone)
    rows, x = RowOrder(batches, step.num_rows), step.rows("x", *inner)
    parts = [rows.take(x, seqs) for seqs in batches]
    assert [p.shape for p in parts] == [(len(r.segments), r.length, *inner) for r in batches]
    back = np.array(rows.pack([p.reshape(-1, *inner) for p in parts]))
    n = step.num_rows - step.padding
    np.testing.assert_array_equal(back[:n], np.array(x)[:n])
    assert not back[n:].any(), "padding is zeros"


@given(step=packed_spans())
def test_each_slot_gets_the_sum_of_the_rows_up_to_its_token(step):
    """A state that adds up rows, over the batches of a step with checkpoints."""
    state_store, batches = state_store_of(step.states(2)), sequence_batches(step.batch)
    before = np.array(state_store[KEY])
    rows, x = RowOrder(batches, step.num_rows), step.rows("x", 2)
    states = BatchStates(state_store)
    for seqs in batches:
        state = states.get(seqs, KEY)
        added = rows.take(x, seqs).sum(axis=1)
        assert not states.has(seqs, KEY)
        states.set(seqs, KEY, added if state is None else state + added)
        assert states.has(seqs, KEY)
    np.testing.assert_array_equal(bits(np.array(state_store[KEY])), bits(before))
    states.commit()
    after = np.array(state_store[KEY])
    expected = before.copy()
    for index, (start, length, slots) in enumerate(step.spans):
        own = np.array(x)[step.rows_of(index)]
        base = 0 if slots.initial == EMPTY_SLOT else before[slots.initial]
        for position, slot in [*slots.checkpoints, (start + length, slots.final)]:
            expected[slot] = base + own[: position - start].sum(axis=0)
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-5)


def test_states_that_are_never_committed_change_nothing():
    spans = [Span(4, 1, SegmentState(0, 0)), Span(4, 1, SegmentState(1, 1))]
    state_store = state_store_of(np.ones((3, 2), np.float32))
    states = BatchStates(state_store)
    (seqs,) = sequence_batches(batch_of(spans))
    states.set(seqs, KEY, states.get(seqs, KEY) + 5)
    assert (np.array(state_store[KEY]) == 1).all()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_state_that_grows_has_zeros_in_front(length):
    """An n-gram's context has one token after the first token, two after the second, ..."""
    state_store = state_store_of(np.full((2, 3, 1), np.nan, np.float32))
    states = BatchStates(state_store)
    (seqs,) = sequence_batches(batch_of([Span(0, length, SegmentState(EMPTY_SLOT, 1))]))
    assert states.get(seqs, KEY) is None
    states.set(seqs, KEY, mx.arange(1.0, length + 1)[None, :, None])
    states.commit()
    grown = [0.0] * (3 - length) + list(range(1, length + 1))
    assert np.array(state_store[KEY])[1, :, 0].tolist() == grown


def test_of_two_modules_that_set_a_state_the_second_counts():
    """The first one keeps the state unchanged."""
    state_store = state_store_of(np.ones((3, 2), np.float32))
    states = BatchStates(state_store)
    (seqs,) = sequence_batches(batch_of([Span(4, 1, SegmentState(0, 1))]))
    before = states.get(seqs, KEY)
    states.set(seqs, KEY, before)
    states.set(seqs, KEY, before + 5)
    assert [len(of_batches) for of_batches in states._new.values()] == [1], "a slot is written once"
    states.commit()
    assert np.array(state_store[KEY])[:, 0].tolist() == [1, 6, 1]


def test_states_that_not_all_parts_before_have_set_are_unknown():
    """Of a new request nothing is known until its module runs; of another, its state continues."""
    spans = [
        Span(0, 6, SegmentState(EMPTY_SLOT, 1, ((4, 2),))),
        Span(8, 6, SegmentState(0, 0, ((12, 3),))),
    ]
    states = BatchStates(state_store_of(np.ones((4, 2), np.float32)))
    first, old, both = sorted(
        sequence_batches(batch_of(spans)), key=lambda seqs: len(seqs.segments)
    )
    if first.initial_slots is not None:
        first, old = old, first
    states.set(old, KEY, states.get(old, KEY))
    assert states.get(both, KEY) is None
    states.set(first, KEY, mx.full((1, 2), 3.0))
    assert sorted(states.get(both, KEY).tolist()) == [[1, 1], [3, 3]]
