"""Attention and K/V writes in MLX operations: runs on every backend, and is the oracle for kernels.

The entry has the form of flash-attention's varlen call: packed queries (N, H, D), the layer's paged
store, the step's metadata.  Keys are always read from the store, after the rows of this step were
written to it: a segment may share blocks that another segment of the same step fills.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod

import numpy as np

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import StepMetadata
from vllm_metal_lite.attention.sdpa.plan import (
    MAX_GATHERED_KEYS,
    Group,
    places,
    plan_groups,
    split_packs,
)
from vllm_metal_lite.attention.upload import upload
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.kv.store import PagedStore

# The CPU backend has no fused kernel: scores are computed in full, a causal half for nothing, and
# exp dominates.  Small query tiles save most of that half; a call costs little beside it.
# Elsewhere SDPA is fused and skips what "causal" hides, and calls are what costs: in the time that
# the host needs for one, an H200 computes some 2 million scores of 16 heads.
_COSTS = {"cpu": {"tile": 256, "call_cost": 1 << 13}}
_FUSED_COSTS = {"tile": 1 << 30, "call_cost": 1 << 21}

# Fetched when this module loads: the seam replaces the public name while a forward is built.
_sdpa = mx.fast.scaled_dot_product_attention


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
        for pack in split_packs(np.arange(len(groups)), sizes, MAX_GATHERED_KEYS):
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
            costs = _COSTS.get(backend.name(), _FUSED_COSTS)
            groups = plan_groups(self.batch, window, chunk=chunk, **costs)
            rows, place = places(groups, self.num_rows)
            on_device = [DeviceGroup(g, window) for g in groups]
            self._plans[window, chunk] = SdpaCalls(on_device, *upload([rows, place]))
        return self._plans[window, chunk]


class ReferenceStep(StepMetadata):
    """A step whose rows all go through SDPA.  sdpa: a plan a KV group."""

    def __init__(self, batch: ForwardBatch, num_rows: int, padding_slots: Sequence[int]) -> None:
        super().__init__(batch, num_rows, padding_slots)
        self.sdpa = [SdpaPlan(b, num_rows) for b in batch.by_group]


class ReferenceAttention:
    """Writes K and V by scatter, attends by gathering from the store into SDPA."""

    name = "reference"
    overlaps = False  # its writes are in place only if nothing still reads the store
    fuses = False
    skinny_rows = range(0)

    def __init__(self, store: PagedStore) -> None:
        self.store = store

    @property
    def state(self) -> list[mx.array]:
        return self.store.arrays

    @state.setter
    def state(self, state: list[mx.array]) -> None:
        half = len(state) // 2
        self.store.keys, self.store.values = list(state[:half]), list(state[half:])

    def prepare(self, batch: ForwardBatch, num_rows: int) -> ReferenceStep:
        return ReferenceStep(batch, num_rows, self.store.padding_slots).on_device()

    def write(self, layer: int, k: mx.array, v: mx.array, step: StepMetadata) -> None:
        self.store.write(layer, k, v, step.slot_mapping[self.store.group_of[layer]])

    def gather(self, layer: int, calls: SdpaCalls) -> Iterator[tuple[mx.array, mx.array]]:
        """Each call's keys and values, (B, num_kv_heads, Lk, head_dim)."""
        spec, keys, values = (
            self.store.specs[layer],
            self.store.keys[layer],
            self.store.values[layer],
        )
        for group in calls.groups:
            k, v = group.gather(keys), group.gather(values)
            yield spec.k_row.unpack(k), spec.v_row.unpack(v)

    def attend(
        self,
        layer: int,
        q: mx.array,
        step: ReferenceStep,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
        q_pe: mx.array | None = None,
        chunk: int | None = None,
    ) -> mx.array:
        if q_pe is not None:
            q = mx.concatenate([q, q_pe], axis=-1)
        calls, outputs = step.sdpa[self.store.group_of[layer]].calls(window, chunk), []
        parts = calls.queries.cut(q if calls.q_rows is None else self.take(q, calls.q_rows))
        gathered = self.gather(layer, calls)
        for g, queries, (k, v) in zip(calls.groups, parts, gathered, strict=True):
            if q_pe is not None:
                k, v = mx.concatenate([k, v], axis=-1), k
            if softcap is None:
                out = _sdpa(queries, k, v, scale=scale, mask=g.mask(q.dtype), sinks=sinks)
            else:
                out = _softcapped(queries, k, v, scale, softcap, g.mask_array(q.dtype), sinks)
            outputs.append(out.swapaxes(1, 2).flatten(0, 1))
        out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return out if calls.place is None else self.take(out, calls.place)

    def take(self, rows: mx.array, index: mx.array) -> mx.array:
        """Rows of queries or results."""
        return rows[index]


def _softcapped(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    softcap: float,
    mask: mx.array,
    sinks: mx.array | None,
) -> mx.array:
    """Attention with capped scores, which MLX's SDPA lacks; shapes are SDPA's."""
    b, heads, rows, _ = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(b, kv_heads, heads // kv_heads, rows, -1)
    scores = (q * scale) @ k[:, :, None].swapaxes(-1, -2)
    scores = softcap * mx.tanh(scores / softcap)
    mask = mask[:, :, None]
    if mask.dtype == mx.bool_:
        scores = mx.where(mask, scores, mx.array(-float("inf"), scores.dtype))
    else:
        scores = scores + mask
    if sinks is not None:
        column = mx.broadcast_to(
            sinks.astype(scores.dtype).reshape(kv_heads, -1, 1, 1), (*scores.shape[:-1], 1)
        )
        scores = mx.concatenate([column, scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., 1:]
    return (weights @ v[:, :, None]).reshape(b, heads, rows, -1)
