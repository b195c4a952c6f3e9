"""Pictures of running requests: which rows of a step are theirs, and how the rows are rotated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.batch.pictures import NO_FEATURE, PictureRows, PlacedPictures
from vllm_metal_lite.errors import RequestError

# The parts of OpenAI's messages and of vLLM's that hold pictures.
PICTURE_PARTS = ("image_url", "image_pil", "image")


class Features(NamedTuple):
    """What a vision tower makes of a picture.

    rows: (R, hidden_size).  deep: such arrays to add after each of the first layers.
    """

    rows: mx.array
    deep: tuple[mx.array, ...] = ()


class NoEyes:
    """The pictures of a model that takes none.  reason: in one line.  Also the base of `Eyes`.

    num_bytes: memory for the tower and for what it keeps.  peak_bytes: what the largest picture
    needs while the tower runs.  settings: how pictures are prepared.
    weights: the tower's, by name.  The rows of a picture depend on these two.
    """

    num_bytes, peak_bytes, settings = 0, 0, ""
    weights: Sequence[tuple[str, mx.array]] = ()

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def prepare(self, items: Any) -> list[Any]:
        """Pictures as the tower takes them.  items: those of multi_modal_data["image"].  Raises
        RequestError."""
        raise RequestError(self.reason)

    def split(self, messages: Any) -> tuple[Any, list[Any]]:
        """(Messages with a part {"type": "image"} for each picture, the prepared pictures).  Raises
        RequestError: chat templates of text leave pictures out without a word."""
        if not isinstance(messages, (list, tuple)):
            return messages, []
        items: list[Any] = []
        rendered = [_without_pictures(message, items) for message in messages]
        return rendered, self.prepare(items) if items else []

    def expand(self, text: str, pictures: Sequence[Any]) -> str:
        """The text with all rows of the pictures."""
        return text

    def place(self, token_ids: Sequence[int], pictures: Sequence[Any]) -> PlacedPictures:
        """Find the rows of the pictures in a prompt.  Raises RequestError."""
        raise RequestError(self.reason)

    def __call__(self, picture: Any) -> Features:
        """The features of a prepared picture."""
        raise NotImplementedError


def _without_pictures(message: Any, items: list[Any]) -> Any:
    """A message with {"type": "image"} for each of its pictures, which are added to `items`."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return message
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in PICTURE_PARTS:
            item = part.get(kind)
            items.append(item.get("url") if isinstance(item, Mapping) else item)
            part = {"type": "image"}
        parts.append(part)
    return {**message, "content": parts}


def with_pictures(
    batch: ForwardBatch,
    pictures: Sequence[PlacedPictures | None],
    look: Callable[[Any], Features],
) -> ForwardBatch:
    """A step's batch, with its rows of pictures.

    pictures: those of each segment's prompt.  look: the tower; a picture's features, computed or
    kept.
    """
    if not any(pictures):
        return batch
    positions, rotary = batch.positions, batch.positions.copy()
    axes = np.broadcast_to(rotary, (3, len(rotary))).copy()
    spans = np.stack([positions, positions + 1], axis=1)
    rows, features = np.full(len(positions), NO_FEATURE, np.int32), list[Features]()
    num_features, only_windowed = 0, False
    segments = pairwise(batch.cu_seqlens_q.tolist())
    for placed, (first, end) in zip(pictures, segments, strict=True):
        if placed is None:
            continue
        at, part = positions[first:end], slice(first, end)
        if placed.axes is not None:
            known = placed.axes.shape[1]
            axes[:, part] = placed.axes[:, np.minimum(at, known - 1)]
            axes[:, part] += np.maximum(at - known + 1, 0)  # the answer's tokens
            rotary[part] = axes[0, part]  # text has one position on all axes
        low, high = np.searchsorted(placed.rows, (at[0], at[-1] + 1))
        if low == high:
            continue
        mine = placed.rows[low:high] - at[0] + first
        used = np.searchsorted(placed.ends, (low, high - 1), side="right")
        start = int(placed.ends[used[0] - 1]) if used[0] else 0
        rows[mine] = np.arange(low, high) - start + num_features
        for i in range(used[0], used[1] + 1):
            features.append(look(placed.pictures[i]))
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
        tuple(mx.concatenate(list(deep)) for deep in zip(*(f.deep for f in features), strict=True)),
        axes if has_axes else None,
        spans if (spans[:, 1] > positions + 1).any() else None,
        only_windowed,
    )
    # Models with inputs of each layer by token (Gemma 4) take token 0 for pictures.
    return replace(batch, token_ids=np.where(rows >= 0, 0, batch.token_ids), pictures=found)
