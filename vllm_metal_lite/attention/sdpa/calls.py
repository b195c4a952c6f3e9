"""The calls of SDPA that cover a step, on the device."""

from collections.abc import Sequence
from functools import cached_property
from math import prod

import numpy as np

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import upload
from vllm_metal_lite.attention.sdpa.plan import (
    Group,
    places,
    plan_groups,
    split_packs,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.devices import profile


class DeviceGroup:
    """A Group's indices on the device, and its mask once it was asked for."""

    def __init__(self, group: Group, window: int | None = None) -> None:
        self.group, self.window = group, window
        self._head_rows: dict[int, mx.array] = {}
        self._masks: dict[mx.Dtype, mx.array] = {}

    @cached_property
    def kv_slots(self) -> mx.array:
        return mx.array(self.group.kv_slots)

    def gather(self, store: mx.array) -> mx.array:
        """The group's keys or values as they are kept, (B, num_kv_heads, Lk, width), in one pass.

        store: (num_slots, num_kv_heads, width), seen as one row a slot and head.
        """
        heads = store.shape[1]
        if heads not in self._head_rows:
            first = self.kv_slots[:, None, :] * heads
            self._head_rows[heads] = first + mx.arange(heads)[:, None]
        return store.reshape(-1, store.shape[2])[self._head_rows[heads]]

    def mask(self, dtype: mx.Dtype) -> mx.array | str | None:
        return self.mask_array(dtype) if self.group.mask == "array" else self.group.mask

    def mask_array(self, dtype: mx.Dtype) -> mx.array:
        """Bool (B, 1, Lq, Lk), or additive in the queries' dtype where bool is not fused (CUDA)."""
        additive = backend.name() == "cuda"
        key = dtype if additive else mx.bool_
        if key not in self._masks:
            q_pos, kv_pos = mx.array(self.group.q_pos)[:, :, None], mx.array(self.group.kv_pos)
            kv_pos = kv_pos[:, None, :]
            visible = kv_pos <= q_pos
            if self.window is not None:
                visible = visible & (kv_pos > q_pos - self.window)
            if self.group.segments is not None:
                segments = mx.array(self.group.segments)[:, :, None]
                visible = visible & (segments == mx.array(self.group.kv_segments)[:, None, :])
            if additive:
                zero, hidden = mx.array(0, dtype), mx.array(-float("inf"), dtype)
                visible = mx.where(visible, zero, hidden)
            self._masks[key] = visible[:, None]
        return self._masks[key]


class EndToEnd:
    """Rows of several calls, one call's behind another's, so that one launch does for all of them.

    shapes: (B, L) of each call.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self._shapes = shapes
        self._looks: dict[tuple[int, int], list[tuple]] = {}

    def cut(self, rows: mx.array) -> list[mx.array]:
        """rows (T, H, D), or more of them -> (B, H, L, D) a call: one look each, nothing copied."""
        heads, dim = rows.shape[1:]
        if (heads, dim) not in self._looks:
            width, first, looks = heads * dim, 0, []
            for b, length in self._shapes:
                strides = (length * width, dim, width, 1)
                looks.append(((b, heads, length, dim), strides, first * width))
                first += b * length
            self._looks[heads, dim] = looks
        flat = rows.reshape(-1)
        return [mx.as_strided(flat, *look) for look in self._looks[heads, dim]]


class SdpaCalls:
    """Calls that cover a step, and the rows that go in and come out.

    q_rows: (T,) rows of the packed batch, end to end as the calls take them; None: the first T.
    place: (num_rows,) the place of each row in the calls' outputs, end to end; None: as they are.
    """

    def __init__(
        self, groups: list[DeviceGroup], q_rows: mx.array | None, place: mx.array | None
    ) -> None:
        self.groups, self.q_rows, self.place = groups, q_rows, place
        self.queries = EndToEnd([g.group.q_pos.shape for g in groups])

    @cached_property
    def gathers(self) -> list[tuple[mx.array, EndToEnd]]:
        """Slots (K,) of the store that are gathered at once, and how they are cut into calls."""
        groups, found = [g.group for g in self.groups], []
        sizes = np.array([prod(g.kv_slots.shape) for g in groups])
        for pack in split_packs(np.arange(len(groups)), sizes, profile().max_gathered_keys):
            slots = [groups[i].kv_slots.reshape(-1) for i in pack]
            together = slots[0] if len(slots) == 1 else np.concatenate(slots)
            found.append((mx.array(together), EndToEnd([groups[i].kv_slots.shape for i in pack])))
        return found


class SdpaPlan:
    """A batch cut into SDPA calls, once a step for each window or chunk that a layer asks for."""

    def __init__(self, batch: ForwardBatch, num_rows: int) -> None:
        self.batch, self.num_rows = batch, num_rows
        self._plans: dict[tuple, SdpaCalls] = {}

    def calls(self, window: int | None, chunk: int | None = None) -> SdpaCalls:
        longest = int(self.batch.seq_lens.max())
        window = None if window is not None and window >= longest else window
        chunk = None if chunk is not None and chunk >= longest else chunk
        if (window, chunk) not in self._plans:
            device = profile()
            groups = plan_groups(
                self.batch, window, chunk=chunk, tile=device.sdpa_tile,
                call_cost=device.sdpa_call_cost,
            )  # fmt: skip
            rows, place = places(groups, self.num_rows)
            on_device = [DeviceGroup(g, window) for g in groups]
            self._plans[window, chunk] = SdpaCalls(on_device, *upload([rows, place]))
        return self._plans[window, chunk]
