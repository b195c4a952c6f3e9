"""The keys that a step's SDPA calls read from the store, gathered together (on the host, numpy).

The tiles of a long chunk read nearly the same keys: calls whose keys are spans of one segment share
one copy.
"""

import numpy as np

from vllm_metal_lite.attention.sdpa.planner import HostCall


def joint_gathers(calls: list[HostCall], cap: int) -> list[tuple[np.ndarray, list[int]]]:
    """Gathers for all calls, in order, of at most `cap` keys each unless one call needs more.

    Of each gather: its slots (K,), and where the keys of each call begin in them.
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
