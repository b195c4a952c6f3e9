"""The state slots of a step: as `InputBatch.pack` numbers them, and what `validate` refuses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tests.batch.test_batch import changed
from tests.support.models.recurrent_steps import Span, batch_of, packed_spans
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, ForwardBatch, SegmentState
from vllm_metal_lite.batch.input_batch import InputBatch

BLOCKS, NUM_SLOTS = 12, 8


@given(step=packed_spans())
def test_pack_equals_a_plain_loop(step):
    batch, row, checkpoints = step.batch, 0, []
    for segment, (start, length, slots) in enumerate(step.spans):
        assert batch.initial_slots[segment] == slots.initial
        assert batch.final_slots[segment] == slots.final
        checkpoints += [[segment, row + at - start, slot] for at, slot in slots.checkpoints]
        row += length
    assert batch.checkpoints.tolist() == checkpoints
    assert batch.checkpoints.shape == (len(checkpoints), 3)
    for array in (batch.initial_slots, batch.final_slots, batch.checkpoints):
        assert array.dtype == np.int32


def test_without_slots_a_requests_slot_is_its_seat():
    inputs = InputBatch(3, 32, 8)
    seats = np.array([inputs.add([5] * 9, 9) for _ in range(3)])[::-1]
    for seat in seats:
        inputs.append_blocks(seat, [int(seat), int(seat) + 3])
    batch = inputs.pack(seats, np.array([8, 0, 3]), np.array([1, 4, 6]))
    assert batch.final_slots.tolist() == seats.tolist() == [2, 1, 0]
    assert batch.initial_slots.tolist() == [2, EMPTY_SLOT, 0]
    assert batch.checkpoints.shape == (0, 3)
    batch.validate(6, num_state_slots=3)
    assert batch.initial_slots.dtype == batch.final_slots.dtype == np.int32


def good_batch() -> ForwardBatch:
    """A decode; a prompt with two checkpoints; a chunk behind a checkpoint that stays."""
    prompt = Span(0, 10, SegmentState(EMPTY_SLOT, 1, ((4, 2), (9, 3))))
    batch = batch_of([Span(8, 1, SegmentState(0, 0)), prompt, Span(7, 5, SegmentState(5, 4))])
    batch.validate(BLOCKS, num_state_slots=NUM_SLOTS)
    return batch


# What is wrong: the field, where it changes, the new value, and the message.
BAD = {
    "a prompt with a state": ("initial_slots", 1, 6, "exactly at position 0"),
    "a decode without a state": ("initial_slots", 0, EMPTY_SLOT, "exactly at position 0"),
    "an initial slot before the pool": ("initial_slots", 0, -2, "state store of 8"),
    "an initial slot behind the pool": ("initial_slots", 2, 8, "state store of 8"),
    "nothing takes the state": ("final_slots", 0, EMPTY_SLOT, "state store of 8"),
    "a final slot behind the pool": ("final_slots", 2, 8, "state store of 8"),
    "a checkpoint behind the pool": ("checkpoints", (1, 2), 8, "state store of 8"),
    "a checkpoint before the pool": ("checkpoints", (1, 2), -1, "state store of 8"),
    "one final slot for two": ("final_slots", 2, 1, "two states"),
    "a checkpoint in a final slot": ("checkpoints", (0, 2), 1, "two states"),
    "two checkpoints in one slot": ("checkpoints", (0, 2), 3, "two states"),
    "another's final slot is read": ("initial_slots", 2, 1, "another segment writes"),
    "another's checkpoint is read": ("initial_slots", 2, 3, "another segment writes"),
    "a checkpoint before the first row": ("checkpoints", (0, 1), 1, "outside its segment"),
    "a checkpoint behind the last row": ("checkpoints", (1, 1), 11, "outside its segment"),
    "a checkpoint of no segment": ("checkpoints", (1, 0), 3, "none of the 3 segments"),
    "a checkpoint of a segment before the first": (
        "checkpoints",
        (1, 0),
        -1,
        "none of the 3 segments",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_slots_are_refused_before_anything_is_computed(fault):
    field, index, value, message = BAD[fault]
    batch = good_batch()
    bad = replace(batch, **{field: changed(getattr(batch, field), index, value)})
    with pytest.raises(ValueError, match=message):
        bad.validate(BLOCKS, num_state_slots=NUM_SLOTS)


@pytest.mark.parametrize(
    ("field", "count", "message"),
    [("final_slots", 2, "3 initial and 2 final"), ("initial_slots", 0, "0 initial and 3 final")],
)
def test_each_segment_has_slots(field, count, message):
    batch = good_batch()
    with pytest.raises(ValueError, match=message):
        replace(batch, **{field: getattr(batch, field)[:count]}).validate(
            BLOCKS, num_state_slots=NUM_SLOTS
        )


def test_two_segments_may_start_from_one_checkpoint():
    spans = [Span(8, 2, SegmentState(5, 0)), Span(8, 3, SegmentState(5, 1))]
    batch_of(spans).validate(BLOCKS, num_state_slots=NUM_SLOTS)


def test_a_model_without_states_has_no_slots_to_be_wrong():
    batch = replace(good_batch(), final_slots=np.full(3, 99, np.int32))
    batch.validate(BLOCKS)
