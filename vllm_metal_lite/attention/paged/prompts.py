"""The prompts of a step, arranged for `varlen_prefill` or MLX's SDPA.

In a small step the host takes longer to build the forward than the device to run it, which delays
decodes beside the prompts.  Such a step uses repeating shapes (`repeats`), so that it can be
compiled.  A step of prompts alone delays no decode, and its sizes rarely repeat.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from vllm_metal_lite.attention.base import Arrays, pad_rows
from vllm_metal_lite.attention.sdpa.calls import (
    DeviceGroup,
    Indices,
    SdpaCalls,
    SdpaPlan,
    on_device,
)
from vllm_metal_lite.attention.sdpa.fused import Unfused
from vllm_metal_lite.attention.sdpa.plan import (
    batch_shape,
    in_one_batch,
    in_one_call,
    places,
    power_of_two,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.common import MIN_ELEMENTS
from vllm_metal_lite.kernels.prefill import plan_tiles


def pad_tables(tables: np.ndarray, num_rows: int, width: int) -> np.ndarray:
    """Block tables cut or padded with zeros to (num_rows, width)."""
    out = np.zeros((num_rows, width), tables.dtype)
    out[: len(tables), : tables.shape[1]] = tables[:, :width]
    return out


@dataclass(frozen=True)
class VarlenPrompts:
    """For `varlen_prefill`: block_tables (S, W) per KV group, cu_seqlens_q (S+1,), seq_lens (S,).

    S (at least MIN_ELEMENTS) and W are powers of two; padded segments have no rows.  tiles: query
    heads per KV head -> the tiles of such layers.
    """

    block_tables: tuple[mx.array, ...]
    cu_seqlens_q: mx.array
    seq_lens: mx.array
    tiles: dict[int, mx.array]
    repeats: bool

    @classmethod
    def plan(
        cls, batch: ForwardBatch, num_rows: int, head_groups: Collection[int], repeats: bool
    ) -> "VarlenPrompts":
        """num_rows: rows of prompts, including padding.  head_groups: query heads per KV head, over
        all layers."""
        segments = max(power_of_two(batch.num_segments), MIN_ELEMENTS)
        longest = max(int(batch.seq_lens.max()), profile().min_keys)
        width = power_of_two(-(-longest // batch.block_size))
        cu_seqlens_q = pad_rows(batch.cu_seqlens_q, segments + 1, batch.num_tokens)
        return cls(
            tuple(mx.array(pad_tables(b.block_tables, segments, width)) for b in batch.by_group),
            mx.array(cu_seqlens_q),
            mx.array(pad_rows(batch.seq_lens, segments)),
            {g: mx.array(plan_tiles(cu_seqlens_q, num_rows, g)) for g in sorted(head_groups)},
            repeats,
        )

    @property
    def arrays(self) -> Arrays:
        return self.block_tables, self.cu_seqlens_q, self.seq_lens, list(self.tiles.values())

    def with_arrays(self, arrays: Arrays) -> "VarlenPrompts":
        block_tables, cu_seqlens_q, seq_lens, tiles = arrays
        return replace(
            self,
            block_tables=tuple(block_tables),
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            tiles=dict(zip(self.tiles, tiles, strict=True)),
        )


@dataclass(frozen=True)
class OneCall:
    """Replaces SdpaPlan: all segments of a KV group in one call, for any window.

    place: see SdpaCalls.
    """

    indices: Indices
    place: mx.array | None
    _calls: dict[int | None, SdpaCalls] = field(default_factory=dict, compare=False, repr=False)

    @property
    def arrays(self) -> Arrays:
        return *self.indices, self.place

    def with_arrays(self, arrays: Arrays) -> "OneCall":
        *indices, place = arrays
        return OneCall(Indices(*indices), place)

    def calls(
        self, window: int | None, chunk: int | None = None, unfused: Unfused | None = None
    ) -> SdpaCalls:
        """`small_mask` bounds the scores, whatever the heads."""
        if window not in self._calls:
            rows = self.indices.q_rows
            rows = None if rows is None else rows.reshape(-1)
            group = DeviceGroup(self.indices, "array", window)
            self._calls[window] = SdpaCalls([group], rows, self.place)
        return self._calls[window]


@dataclass(frozen=True)
class SdpaPrompts:
    """For SDPA.  sdpa: one plan per KV group: one call if `repeats`, else the cheapest calls."""

    sdpa: tuple[SdpaPlan | OneCall, ...]
    repeats: bool

    @classmethod
    def plan(
        cls, batch: ForwardBatch, num_rows: int, windows: Sequence[int | None], repeats: bool
    ) -> "SdpaPrompts":
        """num_rows: rows of prompts, including padding.  windows: the longest window in each KV
        group, None = all.  repeats: whether to compile the step, if its mask is not too large.

        The one call concatenates the segments or pads them as a batch, whichever has fewer scores.
        Concatenation suits prompts of different lengths.  A batch suits similar lengths: its mask
        grows linearly with the number of prompts.
        """
        device = profile()
        min_rows, min_keys = device.min_segment_rows, device.min_keys
        num_keys = power_of_two(max(int(batch.seq_lens.sum()), min_keys))
        shape = batch_shape(batch, min_rows, min_keys)
        batched = batch.num_segments > 1 and prod(shape) < num_rows * num_keys
        if not repeats or (prod(shape) if batched else num_rows * num_keys) > device.small_mask:
            return cls(tuple(SdpaPlan(b, num_rows) for b in batch.by_group), repeats=False)
        calls = []
        for b, window in zip(batch.by_group, windows, strict=True):
            if batched:
                group = in_one_batch(b, min_rows, min_keys, window)
                _, place = places([group], num_rows)
            else:
                group, place = in_one_call(b, num_rows, min_keys, window), None
            calls.append(OneCall(Indices.of(group), on_device(place)))
        return cls(tuple(calls), repeats=True)

    @property
    def arrays(self) -> Arrays:
        return [call.arrays for call in self.sdpa]

    def with_arrays(self, arrays: Arrays) -> "SdpaPrompts":
        calls = zip(self.sdpa, arrays, strict=True)
        return replace(self, sdpa=tuple(call.with_arrays(a) for call, a in calls))
