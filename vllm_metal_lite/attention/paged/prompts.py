"""The segments of a step behind its decodes, as `varlen_prefill` or MLX's SDPA takes them.

In a small step the host needs longer to build the forward than the device to run it, and decodes
beside the prompts wait.  There all arrays have shapes that repeat (`repeats`), so that the step can
be compiled (compiled.py).  Prompts alone let nobody wait, and come in more sizes than come again.
"""

from collections.abc import Collection, Sequence
from copy import copy
from math import prod
from typing import Any

import numpy as np

from vllm_metal_lite.attention.base import pad_rows
from vllm_metal_lite.attention.sdpa.calls import DeviceGroup, SdpaCalls, SdpaPlan
from vllm_metal_lite.attention.sdpa.plan import (
    Group,
    batch_shape,
    in_one_batch,
    in_one_call,
    places,
    power_of_two,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.kernels.varlen_prefill import plan_tiles

# Most rows of prompts in a small step: a chunk of 512, padded.  Who wants decodes to go on beside
# prompts cuts these into such chunks; larger ones are for speed, which SDPA has in calls that need
# no mask.
SMALL_ROWS = 768
# Most entries of the mask that one call for all segments needs: the chunk above at a context of 8k.
_SMALL_MASK = SMALL_ROWS * 8192
# Fewest keys that a step is padded to, so that a prompt's first chunks are of one shape, and fewest
# rows of a segment in a batch.
_MIN_KEYS, _MIN_ROWS = 1024, 64


def pad_tables(tables: np.ndarray, num_rows: int, width: int) -> np.ndarray:
    """Block tables (num_rows, width), zeros behind what there is."""
    out = np.zeros((num_rows, width), tables.dtype)
    out[: len(tables), : tables.shape[1]] = tables[:, :width]
    return out


class VarlenPrompts:
    """For `varlen_prefill`: block_tables (S, W) a KV group, cu_seqlens_q (S+1,), seq_lens (S,).

    S and W are powers of two; segments behind the last have no rows.  num_rows: of prompts, padding
    included.  groups: query heads a KV head, of all layers; if they are not known, tiles are
    planned when they are asked for, and the step is not compiled.  repeats: whether it is to be.
    """

    def __init__(
        self, batch: ForwardBatch, num_rows: int, groups: Collection[int], repeats: bool
    ) -> None:
        self.num_rows, self._groups = num_rows, tuple(groups)
        segments = power_of_two(batch.num_segments)
        width = power_of_two(-(-max(int(batch.seq_lens.max()), _MIN_KEYS) // batch.block_size))
        self.block_tables = [pad_tables(b.block_tables, segments, width) for b in batch.by_group]
        self.cu_seqlens_q = pad_rows(batch.cu_seqlens_q, segments + 1, batch.num_tokens)
        self.seq_lens = pad_rows(batch.seq_lens, segments)
        self._cu = self.cu_seqlens_q
        self._tiles = {g: plan_tiles(self._cu, num_rows, g) for g in self._groups}
        self.repeats = repeats and bool(groups)

    def metadata(self, kv_group: int) -> tuple[mx.array, mx.array, mx.array]:
        return self.block_tables[kv_group], self.cu_seqlens_q, self.seq_lens

    def tiles(self, group: int) -> mx.array:
        """The tiles of layers of `group` query heads a KV head."""
        if group not in self._tiles:
            self._tiles[group] = mx.array(plan_tiles(self._cu, self.num_rows, group))
        return self._tiles[group]

    @property
    def arrays(self) -> list[Any]:
        tiles = [self._tiles[g] for g in self._groups]
        return [self.block_tables, self.cu_seqlens_q, self.seq_lens, tiles]

    def with_arrays(self, arrays: list[Any] | None) -> "VarlenPrompts":
        new = copy(self)
        new.block_tables, new.cu_seqlens_q, new.seq_lens, tiles = arrays or [None] * 4
        new._tiles = dict(zip(self._groups, tiles or (), strict=tiles is not None))
        return new


# What the call of a small step is made of.
_ARRAYS = ("q_rows", "kv_slots", "q_pos", "kv_pos", "segments", "kv_segments")


class _OneCall:
    """In SdpaPlan's place: all segments of a KV group in one call, whatever the window.

    arrays: of the call's Group, and the place of its rows; None in a step that only stands for its
    variant.
    """

    def __init__(self, arrays: list[Any] | None) -> None:
        self.arrays = arrays
        self._calls: dict[int | None, SdpaCalls] = {}

    def calls(self, window: int | None, chunk: int | None = None) -> SdpaCalls:
        if window not in self._calls:
            *arrays, place = self.arrays
            group = Group(mask="array", **dict(zip(_ARRAYS, arrays, strict=True)))
            rows = None if group.q_rows is None else group.q_rows.reshape(-1)
            self._calls[window] = SdpaCalls([DeviceGroup(group, window)], rows, place)
        return self._calls[window]


class SdpaPrompts:
    """For SDPA.  sdpa: a plan a KV group, in small steps one call, else the calls that cost least.

    The one call has all segments end to end, or as a padded batch, whichever is less: prompts of
    unlike lengths cost less end to end, alike ones as a batch, whose mask grows with their number
    and not its square.  num_rows: of prompts, padding included.  windows: the farthest that layers
    of a KV group see, None = all.  repeats: whether the step is to be compiled, if its mask is not
    too large.
    """

    def __init__(
        self, batch: ForwardBatch, num_rows: int, windows: Sequence[int | None], repeats: bool
    ) -> None:
        num_keys = power_of_two(max(int(batch.seq_lens.sum()), _MIN_KEYS))
        shape = batch_shape(batch, _MIN_ROWS, _MIN_KEYS)
        batched = batch.num_segments > 1 and prod(shape) < num_rows * num_keys
        self.repeats = repeats and (prod(shape) if batched else num_rows * num_keys) <= _SMALL_MASK
        if not self.repeats:
            self.sdpa = [SdpaPlan(b, num_rows) for b in batch.by_group]
            return
        self.sdpa = []
        for b, window in zip(batch.by_group, windows, strict=True):
            if batched:
                group = in_one_batch(b, _MIN_ROWS, _MIN_KEYS, window)
                _, place = places([group], num_rows)
            else:
                group, place = in_one_call(b, num_rows, _MIN_KEYS, window), None
            self.sdpa.append(_OneCall([*(getattr(group, name) for name in _ARRAYS), place]))

    @property
    def arrays(self) -> list[Any] | None:
        return [call.arrays for call in self.sdpa] if self.repeats else None

    def with_arrays(self, arrays: list[Any] | None) -> "SdpaPrompts":
        if not self.repeats:
            return self
        new = copy(self)
        new.sdpa = [_OneCall(a) for a in arrays or [None] * len(self.sdpa)]
        return new
