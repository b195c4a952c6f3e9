"""The segments of a step, as the kernels of recurrent layers read them.

A request keeps a state in a slot of the state store, not a row per token.  So a segment names the
slot that it starts from, and the slots that take its state: at its end, and at checkpoints before
its end.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

import numpy as np

from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS

# As an initial slot: rows of no request.  Their results are zeros.
PADDING = -2


def pack_segments(
    cu_seqlens: np.ndarray,
    initial_slots: np.ndarray,
    final_slots: np.ndarray,
    num_rows: int,
    checkpoints: Iterable[tuple[int, int, int]] = (),
    num_segments: int = 0,
) -> np.ndarray:
    """The segments (S + 1 or more, 2 + 2 M) int32 of a step with S segments.

    cu_seqlens: (S+1,), empty segments allowed.  initial_slots: (S,), the slot whose state a segment
    starts from; EMPTY_SLOT: zeros.  final_slots: (S,), the slot that takes the state after the
    segment; EMPTY_SLOT: none.  num_rows: packed rows, padding included.  checkpoints: (segment,
    row, slot): `slot` takes the state that `segment` has before packed row `row`.
    num_segments: the result has at least one row more.
    `ForwardBatch.validate` has checked these numbers: a wrong index in a kernel would corrupt
    memory.

    A row of the result is begin, initial slot, and M pairs (end, slot) in order of their ends.  The
    last pair is the segment's own end; a segment with fewer checkpoints than others has pairs
    (begin, EMPTY_SLOT) first.  The padding is segment S; segments behind it have no rows.  All
    columns are fixed by the step, so one array serves all layers.
    """
    ends, begins = cu_seqlens[1:], cu_seqlens[:-1]
    inside = {s: list(of) for s, of in groupby(sorted(checkpoints), key=itemgetter(0))}
    pairs = 1 + max(map(len, inside.values()), default=0)
    segments = np.full((len(begins) + 1, 2 + 2 * pairs), EMPTY_SLOT, np.int32)
    segments[:-1, 0], segments[:-1, 1] = begins, initial_slots
    segments[-1, 0], segments[-1, 1] = cu_seqlens[-1], PADDING
    segments[:, 2::2] = segments[:, :1]
    segments[:-1, -2], segments[:-1, -1] = ends, final_slots
    segments[-1, -2] = num_rows
    for s, of in inside.items():
        for column, (_, row, slot) in enumerate(of, pairs - 1 - len(of)):
            segments[s, 2 + 2 * column : 4 + 2 * column] = row, slot
    fewest = max(num_segments + 1, -(-MIN_ELEMENTS // segments.shape[1]))
    missing = max(0, fewest - len(segments))
    nothing = np.full((missing, segments.shape[1]), EMPTY_SLOT, np.int32)
    nothing[:, 1], nothing[:, 0], nothing[:, 2::2] = PADDING, num_rows, num_rows
    return np.concatenate([segments, nothing])
