"""The segments of a step, as the kernels of recurrent layers read them.

A request keeps a state in a slot of a pool, not a row per token.  So a segment names the slot that
it starts from, and the slots that take its state: at its end, and at checkpoints before its end.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT
from vllm_metal_lite.kernels.common import MIN_ELEMENTS
from vllm_metal_lite.kernels.launch import Template
from vllm_metal_lite.kernels.new_rows import Columns

# As an initial slot: start from zeros.  As a slot to write: none.
EMPTY = EMPTY_SLOT
# As an initial slot: rows of no request.  Their results are zeros.
PADDING = -2


def plan_segments(
    cu_seqlens: np.ndarray,
    initial_slots: np.ndarray,
    final_slots: np.ndarray,
    num_rows: int,
    num_slots: int,
    checkpoints: Iterable[tuple[int, int, int]] = (),
) -> np.ndarray:
    """The segments (S + 1, 2 + 2 M) int32 of a step with S segments.

    cu_seqlens: (S+1,), empty segments allowed.  initial_slots: (S,), the slot whose state a segment
    starts from, or EMPTY.  final_slots: (S,), the slot that takes the state after the segment, or
    EMPTY.  num_rows: packed rows, padding included.  num_slots: slots of the pools.  checkpoints:
    (segment, row, slot): `slot` takes the state that `segment` has before packed row `row`.

    A row of the result is begin, initial slot, and M pairs (end, slot) in order of their ends.  The
    last pair is the segment's own end; a segment with fewer checkpoints than others has pairs
    (begin, EMPTY) first.  The last segment is the padding.  All columns are fixed by the step, so
    one array serves all layers.

    Raises ValueError for a slot that does not exist, a slot that one segment writes and another
    uses, a checkpoint outside its segment, or a cu_seqlens that does not ascend from 0 to at most
    num_rows: a wrong index in a kernel would corrupt memory.
    """
    ends, begins = cu_seqlens[1:], cu_seqlens[:-1]
    if cu_seqlens[0] != 0 or (begins > ends).any() or cu_seqlens[-1] > num_rows:
        raise ValueError(f"cu_seqlens must ascend from 0 to at most {num_rows}: {cu_seqlens}")
    if not len(begins) == len(initial_slots) == len(final_slots):
        raise ValueError(
            f"{len(begins)} segments have {len(initial_slots)} initial and "
            f"{len(final_slots)} final slots"
        )
    inside = {s: list(of) for s, of in groupby(sorted(checkpoints), key=itemgetter(0))}
    pairs = 1 + max(map(len, inside.values()), default=0)
    segments = np.full((len(begins) + 1, 2 + 2 * pairs), EMPTY, np.int32)
    segments[:-1, 0], segments[:-1, 1] = begins, initial_slots
    segments[-1, 0], segments[-1, 1] = cu_seqlens[-1], PADDING
    segments[:, 2::2] = segments[:, :1]
    segments[:-1, -2], segments[:-1, -1] = ends, final_slots
    segments[-1, -2] = num_rows
    for s, of in inside.items():
        for column, (_, row, slot) in enumerate(of, pairs - 1 - len(of)):
            if not (0 <= s < len(begins) and begins[s] <= row <= ends[s]):
                raise ValueError(f"checkpoint before row {row} is outside segment {s}")
            segments[s, 2 + 2 * column : 4 + 2 * column] = row, slot
    slots = np.concatenate([segments[:-1, 1], segments[:, 3::2].ravel()])
    if ((slots < EMPTY) | (slots >= num_slots)).any():
        raise ValueError(f"slots must be {EMPTY} to {num_slots - 1}: {slots}")
    if shared := _shared_slots(segments):
        raise ValueError(f"slots that one segment writes and another uses: {shared}")
    missing = max(0, -(-MIN_ELEMENTS // segments.shape[1]) - len(segments))
    nothing = np.full((missing, segments.shape[1]), EMPTY, np.int32)
    nothing[:, 1], nothing[:, 0], nothing[:, 2::2] = PADDING, num_rows, num_rows
    return np.concatenate([segments, nothing])


def _shared_slots(segments: np.ndarray) -> list[int]:
    """Slots written by one segment and read or written by another, or twice by one."""
    written = segments[:, 3::2]
    slots, times = np.unique(written[written >= 0], return_counts=True)
    owner = np.full(segments.max(initial=0) + 1, -1)
    segment = np.broadcast_to(np.arange(len(segments))[:, None], written.shape)
    owner[written[written >= 0]] = segment[written >= 0]
    read = segments[:, 1]
    of = owner[np.maximum(read, 0)]
    foreign = read[(read >= 0) & (of >= 0) & (of != np.arange(len(segments)))]
    return sorted({*slots[times > 1].tolist(), *foreign.tolist()})


def check_pool(states: mx.array, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    """Raise ValueError unless the pool of states is (slots, *shape) of dtype."""
    if states.shape[1:] != shape or states.dtype != dtype:
        wanted = ", ".join(map(str, shape))
        raise ValueError(
            f"the pool of states is {states.shape} {states.dtype}, not (slots, {wanted}) {dtype}"
        )


def columns_template(name: str, columns: Columns, size: int, dtype: mx.Dtype) -> Template:
    """Template values for `size` columns of the input `name`: NAME_WIDTH and NAME_START.

    Raises ValueError if the columns lie outside their array or are not of dtype.
    """
    (array, start, _), width = columns, columns.array.shape[-1]
    if not 0 <= start <= width - size or array.dtype != dtype:
        raise ValueError(
            f"{name} is columns {start} to {start + size} of {dtype}, "
            f"but its array is {array.shape} {array.dtype}"
        )
    return {f"{name.upper()}_WIDTH": width, f"{name.upper()}_START": start}
