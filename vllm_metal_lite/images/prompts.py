"""Places pictures in prompts: expands the text, finds their rows, and names their blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.images.families import Family, Prepared
from vllm_metal_lite.images.positions import axes


def expand(text: str, family: Family, pictures: Sequence[Prepared]) -> str:
    """The text with each placeholder replaced by its picture's text, in order.  Pictures may be
    left over: a beginning of a conversation has fewer.  Raises RequestError for too few."""
    parts = text.split(family.placeholder)
    if len(parts) - 1 > len(pictures):
        raise RequestError(
            f"the prompt has {len(parts) - 1} places for pictures ({family.placeholder}), and "
            f"{len(pictures)} pictures are given"
        )
    texts = [family.text_of(picture) for picture in pictures]
    return "".join(part + own for part, own in zip(parts, [*texts, ""], strict=False))


@dataclass(frozen=True, slots=True)
class PlacedPictures:
    """The pictures of one prompt.

    rows: (M,) int32, the positions of their tokens in the prompt, in order.  ends: (len(pictures),)
    the end of each picture's part of `rows`.
    axes: (3, num_tokens) int32 positions for the rotation, and delta, if the family rotates by grid
    (positions.py); None, 0: all tokens are rotated by their position.
    spans: (start, end) of the rows that must be computed in one step, for each picture; empty if
    rows see only what comes before.
    """

    pictures: tuple[Prepared, ...]
    rows: np.ndarray
    ends: np.ndarray
    axes: np.ndarray | None
    delta: int
    spans: tuple[tuple[int, int], ...]


def place(
    token_ids: Sequence[int], family: Family, pictures: Sequence[Prepared]
) -> PlacedPictures:
    """Find the rows of pictures in a prompt.  Raises RequestError if their number differs from the
    prompt's image tokens."""
    rows = np.flatnonzero(np.asarray(token_ids) == family.image_token_id).astype(np.int32)
    ends = np.cumsum([picture.num_rows for picture in pictures], dtype=np.int64)
    if len(rows) != ends[-1]:
        raise RequestError(
            f"the prompt has {len(rows)} image tokens ({family.image_token_id}), and the "
            f"{len(pictures)} pictures have {ends[-1]} rows"
        )
    starts = rows[np.append(0, ends[:-1])]
    positions, delta = None, 0
    if family.rotates_by_grid:
        grids = [picture.merged for picture in pictures]
        positions, delta = axes(len(token_ids), starts.tolist(), grids)
    spans: tuple[tuple[int, int], ...] = ()
    if family.sees_whole_picture:
        lasts = rows[ends - 1]
        spans = tuple((int(a), int(b) + 1) for a, b in zip(starts, lasts, strict=True))
    return PlacedPictures(tuple(pictures), rows, ends, positions, delta, spans)


def block_extras(placed: PlacedPictures) -> Callable[[int, int], bytes]:
    """For tokens [start, end) of a prompt: the digests of the pictures with rows there."""
    starts = placed.rows[np.append(0, placed.ends[:-1])]
    lasts = placed.rows[placed.ends - 1]

    def extras(start: int, end: int) -> bytes:
        within = np.flatnonzero((starts < end) & (lasts >= start))
        return b"".join(placed.pictures[i].digest for i in within)

    return extras
