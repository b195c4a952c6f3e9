"""The SDPA calls that cover a step, on the device, and their rows in joined arrays.

Several calls share an array of queries, and an array of the keys that they read.  The tiles of a
long chunk read nearly the same keys: calls whose keys are spans of one segment share one copy.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import AttentionCall
from vllm_metal_lite.attention.sdpa.fused import Unfused
from vllm_metal_lite.attention.sdpa.planner import CallPlanner, HostCall, places
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.devices import profile


class Joined:
    """Rows of several calls in one array, so that one launch serves all of them.

    shapes: the (B, L) of each call.  begins: the first row of each call; None if the calls lie end
    to end.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], begins: Sequence[int] | None = None
    ) -> None:
        sizes = [b * length for b, length in shapes]
        self._shapes, self._begins = shapes, begins or [0, *accumulate(sizes[:-1])]
        self._views: dict[tuple[int, int, int], list[tuple]] = {}

    def cut(self, rows: mx.array, axis: int = 0) -> list[mx.array]:
        """Cut rows (T, H, D), or with axis 1 (H, T, D), into a view (B, H, L, D) for each call,
        without a copy.  Rows behind those of the calls are ignored."""
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
    """Plan gathers for all calls, in order.  A gather has at most `cap` keys unless one call needs
    more.

    Returns for each gather its slots (K,), and where the keys of each call begin in them.
    """
    spans = _spans(calls)
    found: list[tuple[list[np.ndarray], list[int]]] = []
    begins: dict[int, int] = {}  # where segments begin in the last gather
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
    """For each segment with spans: the first position of the keys that they need, and the slots."""
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


def on_device(array: np.ndarray | None) -> mx.array | None:
    return None if array is None else mx.array(array)


class DeviceCall:
    """One SDPA call on the device, with masks that are built when they are needed.

    host: the call on the host.
    """

    def __init__(self, host: HostCall, window: int | None) -> None:
        self.host, self.window = host, window
        self._masks: dict[mx.Dtype, mx.array] = {}

    def mask(self, dtype: mx.Dtype) -> mx.array | str | None:
        """The mask as MLX's SDPA takes it.  An array is (B, 1, Lq, Lk), bool; on CUDA, which
        cannot fuse bool masks, it is additive in the queries' dtype."""
        if self.host.mask != "array":
            return self.host.mask
        key = dtype if backend.name() == "cuda" else mx.bool_
        if key not in self._masks:
            mask = self._visible(0)
            if key != mx.bool_:
                mask = mx.where(mask, mx.array(0, dtype), mx.array(-float("inf"), dtype))
            self._masks[key] = mask
        return self._masks[key]

    @cached_property
    def visible(self) -> mx.array:
        """Bool (B, 1, Lq, Lk - num_visible): whether rows see keys after num_visible."""
        return self._visible(self.host.num_visible)

    def _visible(self, first: int) -> mx.array:
        q_pos, kv_pos = mx.array(self.host.q_pos)[:, :, None], mx.array(self.host.kv_pos)[:, None]
        kv_pos, segments = kv_pos[..., first:], on_device(self.host.segments)
        visible = kv_pos <= q_pos
        if self.window is not None:
            visible = visible & (kv_pos > q_pos - self.window)
        if (sees := on_device(self.host.sees)) is not None:
            begin, end = sees[:, :, :1], sees[:, :, 1:]
            visible = visible | ((kv_pos >= begin) & (kv_pos < end))
        if segments is not None:
            visible = visible & (segments[:, :, None] == segments[:, None, first:])
        return visible[:, None]


class StepCalls:
    """The SDPA calls that cover a step, with their input and output rows.

    q_rows: (T,), the rows of the packed batch in the order of the calls; None: they are the first
    T.  place: (num_rows,), where each row is in the concatenated outputs of the calls; None: the
    rows are in order.  gathers: for each gather, its slots (K,), and how its rows are cut into
    calls.
    """

    def __init__(self, planned: list[HostCall], window: int | None, num_rows: int) -> None:
        self.calls = [DeviceCall(call, window) for call in planned]
        self.q_rows, self.place = map(on_device, places(planned, num_rows))
        self.queries = Joined([call.q_pos.shape for call in planned])
        self.gathers, shapes = [], iter([call.kv_slots.shape for call in planned])
        for slots, begins in joint_gathers(planned, profile().max_gathered_keys):
            cut = Joined([next(shapes) for _ in begins], begins)
            self.gathers.append((mx.array(slots), cut))


class SdpaPlan:
    """A batch cut into SDPA calls, once per step for each KV group, window and attention chunk.

    Its calls differ between steps, so such a step is never compiled.
    """

    repeats = False

    def __init__(self, batch: ForwardBatch, num_rows: int) -> None:
        self.batch, self.num_rows = batch, num_rows
        self._plans: dict[tuple, StepCalls] = {}

    def step_calls(self, kv_group: int, call: AttentionCall, unfused: Unfused | None) -> StepCalls:
        """The calls of a layer.  unfused: the calls that MLX does not fuse; None: MLX fuses all."""
        longest = int(self.batch.seq_lens.max())
        window, chunk = (
            None if limit is not None and limit >= longest else limit
            for limit in (call.scores.window, call.attention_chunk)
        )
        pictures = self.batch.pictures
        spans = None if pictures is None else pictures.spans_of(call.scores.window)
        key = kv_group, window, chunk, unfused
        by_layer = *key, spans is None
        if by_layer not in self._plans:
            planned = CallPlanner(self.batch, *key, spans).calls()
            self._plans[by_layer] = StepCalls(planned, window, self.num_rows)
        return self._plans[by_layer]
