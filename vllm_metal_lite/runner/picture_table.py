"""Pictures of running requests: which rows of a step are theirs, and how the rows are rotated."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import NO_FEATURE, ForwardBatch, PictureRows


class Features(NamedTuple):
    """What a vision tower makes of a picture.

    rows: (R, hidden_size).  deep: such arrays to add after each of the first layers.
    """

    rows: mx.array
    deep: tuple[mx.array, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedPictures:
    """The pictures of one prompt.

    pictures: the prepared pictures, as `look` takes them.  digests: the name of each.
    rows: (M,) int32, the positions of their tokens in the prompt, in order.  ends: the end of each
    picture's part of `rows`.
    axes: (3, num_tokens) int32 positions for the rotation, and `delta`, which rotates later tokens:
    position + delta.  None and 0: the position rotates each token.
    spans: (start, end) of the positions that see each other, for each picture; empty: none do.
    only_windowed: only in layers with a window.
    """

    pictures: tuple[Any, ...]
    digests: tuple[bytes, ...]
    rows: np.ndarray
    ends: np.ndarray
    axes: np.ndarray | None = None
    delta: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    only_windowed: bool = False

    def extra_name(self, start: int, end: int) -> bytes:
        """What the name of a block of tokens [start, end) needs beside the tokens: the digests of
        the pictures with rows there."""
        first, last = np.searchsorted(self.rows, (start, end))
        if first == last:
            return b""
        found = np.searchsorted(self.ends, (first, last - 1), side="right")
        return b"".join(self.digests[found[0] : found[1] + 1])


class PictureTable:
    """The unfinished requests with pictures, by a key of the caller's choice.

    look: the tower; a picture's features, computed or kept.
    """

    def __init__(self, look: Callable[[Any], Features]) -> None:
        self._look = look
        self._placed: dict[Hashable, PlacedPictures] = {}

    def add(self, key: Hashable, placed: PlacedPictures) -> None:
        self._placed[key] = placed

    def remove(self, key: Hashable) -> None:
        self._placed.pop(key, None)

    def extend(self, batch: ForwardBatch, keys: Sequence[Hashable]) -> ForwardBatch:
        """A step's batch, with its rows of pictures.  keys: one per segment."""
        if not self._placed or self._placed.keys().isdisjoint(keys):
            return batch
        positions, rotary = batch.positions, batch.positions.copy()
        axes = np.broadcast_to(rotary, (3, len(rotary))).copy()
        spans = np.stack([positions, positions + 1], axis=1)
        rows, features = np.full(len(positions), NO_FEATURE, np.int32), list[Features]()
        num_features, only_windowed = 0, False
        for key, (first, end) in zip(keys, pairwise(batch.cu_seqlens_q.tolist()), strict=True):
            if (placed := self._placed.get(key)) is None:
                continue
            at, part = positions[first:end], slice(first, end)
            rotary[part] = at + placed.delta
            if placed.axes is not None:
                known = placed.axes.shape[1]
                axes[:, part] = placed.axes[:, np.minimum(at, known - 1)]
                axes[:, part] += np.maximum(at - known + 1, 0)
            low, high = np.searchsorted(placed.rows, (at[0], at[-1] + 1))
            if low == high:
                continue
            mine = placed.rows[low:high] - at[0] + first
            used = np.searchsorted(placed.ends, (low, high - 1), side="right")
            start = int(placed.ends[used[0] - 1]) if used[0] else 0
            rows[mine] = np.arange(low, high) - start + num_features
            for i in range(used[0], used[1] + 1):
                features.append(self._look(placed.pictures[i]))
                num_features += len(features[-1].rows)
                only_windowed = placed.only_windowed
                if placed.spans:
                    within = (at >= placed.spans[i][0]) & (at < placed.spans[i][1])
                    spans[part][within] = placed.spans[i]
        if (rotary != positions).any():
            batch = replace(batch, rotary_positions=rotary)
        if not features:
            return batch
        has_axes = bool((axes != rotary).any())
        found = PictureRows(
            rows,
            mx.concatenate([f.rows for f in features]),
            tuple(map(mx.concatenate, zip(*(f.deep for f in features), strict=True))),
            axes if has_axes else None,
            spans if (spans[:, 1] > positions + 1).any() else None,
            only_windowed,
        )
        # Models with inputs of each layer by token (Gemma 4) take token 0 for pictures.
        return replace(batch, token_ids=np.where(rows >= 0, 0, batch.token_ids), pictures=found)
