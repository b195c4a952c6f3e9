"""Packed steps of recurrent layers, with state slots, and state stores to run them over."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from tests.support.engine.batches import pack
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, ForwardBatch, SegmentState
from vllm_metal_lite.kernels.store import new_ticket
from vllm_metal_lite.kv.state_store import Key, StateSpec, StateStore
from vllm_metal_lite.recurrence.base import StepRecurrence
from vllm_metal_lite.recurrence.kernels import KernelRecurrence, SegmentPlan
from vllm_metal_lite.recurrence.reference import ReferenceRecurrence

_FREE, _MOST_ROWS = 2, 256


class Span(NamedTuple):
    """A segment: tokens before it, its rows, and its slots."""

    start: int
    length: int
    slots: SegmentState


class PackedSpans(NamedTuple):
    """A step of segments over `num_slots` state slots, with rows of padding.

    seed: of all values.  first: which of the drawn rows is the step's first row.
    """

    spans: tuple[Span, ...]
    num_slots: int
    padding: int = 0
    seed: int = 0
    first: int = 0

    @property
    def batch(self) -> ForwardBatch:
        return batch_of(self.spans)

    @property
    def num_rows(self) -> int:
        return sum(span.length for span in self.spans) + self.padding

    @property
    def read(self) -> set[int]:
        return {span.slots.initial for span in self.spans} - {EMPTY_SLOT}

    @property
    def written(self) -> set[int]:
        return {slot for span in self.spans for slot in (span.slots.final, *_taken(span))}

    def rows_of(self, index: int) -> slice:
        """The rows of a segment."""
        begin = sum(span.length for span in self.spans[:index])
        return slice(begin, begin + self.spans[index].length)

    def alone(self, index: int) -> "PackedSpans":
        """One of the segments as a step: the same rows, the same states."""
        first = self.first + self.rows_of(index).start
        return self._replace(spans=(self.spans[index],), padding=0, first=first)

    def rows(self, name: str, *inner: int) -> mx.array:
        """Values (num_rows, *inner) of the step's rows."""
        return self.parameter(name, _MOST_ROWS, *inner)[self.first :][: self.num_rows]

    def parameter(self, name: str, *shape: int) -> mx.array:
        """Values that are the same for the same name and seed."""
        rng = np.random.default_rng([self.seed, *name.encode()])
        return mx.array(rng.standard_normal(shape).astype(np.float32))

    def states(self, *shape: int) -> np.ndarray:
        """A state for each slot that a segment starts from, NaN in all other slots."""
        states = np.array(self.parameter("states", self.num_slots, *shape)) / 2
        states[[slot for slot in range(self.num_slots) if slot not in self.read]] = np.nan
        return states


def _taken(span: Span) -> list[int]:
    return [slot for _, slot in span.slots.checkpoints]


def batch_of(spans: Sequence[Span]) -> ForwardBatch:
    """The batch of these segments, validated."""
    batch = pack([span[:2] for span in spans], states=[span.slots for span in spans])
    slots = [s for span in spans for s in (span.slots.initial, span.slots.final, *_taken(span))]
    batch.validate(batch.block_tables.max() + 1, num_state_slots=max(slots) + 1)
    return batch


@st.composite
def packed_spans(draw: Any) -> PackedSpans:
    """Steps of decodes, whole prompts and chunks; some leave their initial slot as it is, some
    leave checkpoints.  _FREE slots belong to nobody."""
    count = draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**16))
    lengths = sorted(
        draw(st.lists(st.one_of(st.just(1), st.integers(1, 21)), min_size=count, max_size=count)),
        key=lambda length: length > 1,
    )
    num_slots = count * 4 + _FREE
    free = np.random.default_rng(seed).permutation(num_slots).tolist()
    spans = []
    for length in lengths:
        start = draw(st.sampled_from([0, 1, 5, 40]))
        final = free.pop()
        initial = EMPTY_SLOT if start == 0 else free.pop() if draw(st.booleans()) else final
        inside = draw(st.sets(st.integers(1, length - 1), max_size=2)) if length > 1 else ()
        taken = tuple((start + at, free.pop()) for at in sorted(inside))
        spans.append(Span(start, length, SegmentState(initial, final, taken)))
    return PackedSpans(tuple(spans), num_slots, draw(st.integers(0, 3)), seed)


KEY: Key = (0, 0)
Form = Callable[[PackedSpans, StateStore], StepRecurrence]
Call = Callable[[StepRecurrence, Key, PackedSpans], mx.array]


class _Order:
    """What kernels launched on one store share."""

    def __init__(self) -> None:
        self.ticket = new_ticket()


def reference(step: PackedSpans, state_store: StateStore) -> StepRecurrence:
    return ReferenceRecurrence(state_store, step.batch, step.num_rows)


def kernels(step: PackedSpans, state_store: StateStore) -> StepRecurrence:
    """By the kernels; hold `metal.host.installed(writable_inputs=["states"])`."""
    return KernelRecurrence(state_store, SegmentPlan.plan(step.batch, step.num_rows), _Order())


def run(
    form: Form, step: PackedSpans, states: np.ndarray, call: Call
) -> tuple[np.ndarray, np.ndarray]:
    """(rows without padding, states after) of one call over a state store that holds `states`."""
    state_store = state_store_of(states)
    recurrence = form(step, state_store)
    y = call(recurrence, KEY, step)
    # Launches write the store in place, so it is read when they have run.
    mx.eval(y, state_store.arrays)
    assert len(y) == step.num_rows
    return np.array(y)[: step.num_rows - step.padding], np.array(state_store[KEY])


def state_store_of(states: np.ndarray) -> StateStore:
    """A state store of one layer with these states."""
    num_slots, *shape = states.shape
    state_store = StateStore([StateSpec(KEY, tuple(shape), mx.float32)], num_slots)
    state_store._arrays[KEY] = mx.array(states)  # not by the store's `write`, which is under test
    mx.eval(state_store.arrays)
    return state_store


def bits(a: np.ndarray) -> np.ndarray:
    """float32 values, NaN included, as they can be compared."""
    return a.view(np.uint32)
