"""Places pictures in prompts: expands the text, and finds the rows of pictures."""

from collections.abc import Sequence

import numpy as np

from vllm_metal_lite.batch.pictures import PlacedPictures
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.images.family import Family, Prepared
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


def place(token_ids: Sequence[int], family: Family, pictures: Sequence[Prepared]) -> PlacedPictures:
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
    positions = None
    if family.rotates_by_grid:
        grids = [picture.merged for picture in pictures]
        positions = axes(len(token_ids), starts.tolist(), grids)
    spans: tuple[tuple[int, int], ...] = ()
    if family.sees_whole_picture:
        lasts = rows[ends - 1]
        spans = tuple((int(a), int(b) + 1) for a, b in zip(starts, lasts, strict=True))
    return PlacedPictures(
        tuple(pictures),
        tuple(picture.digest for picture in pictures),
        rows,
        ends,
        positions,
        spans,
        only_windowed=family.sees_whole_picture == "sliding",
    )
