"""Rows of several SDPA calls in one array: queries, and the keys that the calls read.

The tiles of a long chunk read nearly the same keys: calls whose keys are spans of one segment share
one copy.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from vllm_metal_lite.attention.sdpa.planner import HostCall
from vllm_metal_lite.backend import mx


class Joined:
    """Rows of several calls in one array, so that one launch serves all of them.

    shapes: (B, L) of each call.  begins: the first row of each; None: they are concatenated.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], begins: Sequence[int] | None = None
    ) -> None:
        sizes = [b * length for b, length in shapes]
        self._shapes, self._begins = shapes, begins or [0, *accumulate(sizes[:-1])]
        self._views: dict[tuple[int, int, int], list[tuple]] = {}

    def cut(self, rows: mx.array, axis: int = 0) -> list[mx.array]:
        """rows (T, H, D), or (H, T, D) with axis 1 -> a view (B, H, L, D) for each call, without a
        copy.  T may be more than the calls have."""
        heads, dim = rows.shape[1 - axis], rows.shape[2]
        of_row, of_head = (heads * dim, dim) if axis == 0 else (dim, rows.shape[1] * dim)
        key = heads, of_row, of_head
        if key not in self._views:
            views = self._views[key] = []
            for (b, length), first in zip(self._shapes, self._begins, strict=True):
                strides = (length * of_row, of_head, of_row, 1)
                views.append(((b, heads, length, dim), strides, first * of_row))
        flat = rows.reshape(-1)
        return [mx.as_strided(flat, *view) for view in self._views[key]]


def joint_gathers(calls: list[HostCall], cap: int) -> list[tuple[np.ndarray, list[int]]]:
    """Gathers for all calls, in order, of at most `cap` keys each unless one call needs more.

    Returns for each gather its slots (K,), and where the keys of each call begin in them.
    """
    spans = _spans(calls)
    found: list[tuple[list[np.ndarray], list[int]]] = []
    begins: dict[int, int] = {}  # of the segments in the last gather
    size = cap
    for i, call in enumerate(calls):
        segment, start = call.span or (-1 - i, 0)
        first, slots = spans.get(segment, (0, call.kv_slots.ravel()))
        if segment not in begins:
            if size + len(slots) > cap:
                found.append(([], []))
                size, begins = 0, {}
            begins[segment] = size
            size += len(slots)
            found[-1][0].append(slots)
        found[-1][1].append(begins[segment] + start - first)
    return [(np.concatenate(parts), starts) for parts, starts in found]


def _spans(calls: list[HostCall]) -> dict[int, tuple[int, np.ndarray]]:
    """The keys that the spans of each segment need: their first position, and their slots."""
    spans: dict[int, list[tuple[int, np.ndarray]]] = {}
    for call in calls:
        if call.span is not None:
            segment, start = call.span
            spans.setdefault(segment, []).append((start, call.kv_slots[0]))
    found = {}
    for segment, parts in spans.items():
        first = min(start for start, _ in parts)
        # No call reads the keys between spans, so any slot of the segment will do there.
        slots = np.full(max(s + len(p) for s, p in parts) - first, parts[0][1][0])
        # In the order of their rows, so that keys overwrite the padding of the tile before.
        for start, part in parts:
            slots[start - first : start - first + len(part)] = part
        found[segment] = first, slots
    return found
