"""Pictures on the host: those of a prompt, and the rows of a step that they change."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# In PictureRows.rows: a row of text.
NO_FEATURE = -1


def sees_spans(only_windowed: bool, window: int | None) -> bool:
    """Whether rows of a layer with this window see their spans."""
    return window is not None or not only_windowed


@dataclass(frozen=True, slots=True)
class PictureRows:
    """The rows of a step that pictures change.

    rows: (N,) int32, the row of the features that replaces a token's embedding, or NO_FEATURE.
    features: (F, hidden_size), on the device, before the model scales embeddings.  deep: arrays of
    the same rows, one for each of the first layers, which are added to the layer's result.
    axes: (3, N) int32, positions for the rotation by time, row and column, or None: each row is
    rotated by one position.
    spans: (N, 2) int32, start and end of the positions that a row sees beside those before it, or
    None: rows see only what comes before.  only_windowed: only layers with a window see spans.
    """

    rows: np.ndarray
    features: Any
    deep: tuple[Any, ...] = ()
    axes: np.ndarray | None = None
    spans: np.ndarray | None = None
    only_windowed: bool = False

    def spans_of(self, window: int | None) -> np.ndarray | None:
        """The spans that rows of a layer with this window see."""
        return self.spans if sees_spans(self.only_windowed, window) else None

    def from_row(self, first: int) -> "PictureRows":
        """Those of the rows from `first` on, for attention."""
        return self if self.spans is None else replace(self, spans=self.spans[first:])


@dataclass(frozen=True, slots=True)
class PlacedPictures:
    """The pictures of one prompt.

    pictures: the prepared pictures, as `look` takes them.  digests: the name of each.
    rows: (M,) int32, the positions of their tokens in the prompt, in order.  ends: the end of each
    picture's part of `rows`.
    axes: (3, num_tokens) int32 positions for the rotation; the tokens of the answer continue from
    the last one.  None: the position rotates each token.
    spans: (start, end) of the positions that see each other, for each picture; empty: none do.
    only_windowed: only in layers with a window.
    """

    pictures: tuple[Any, ...]
    digests: tuple[bytes, ...]
    rows: np.ndarray
    ends: np.ndarray
    axes: np.ndarray | None = None
    spans: tuple[tuple[int, int], ...] = ()
    only_windowed: bool = False

    @property
    def starts(self) -> np.ndarray:
        """(P,) the position of each picture's first row."""
        return self.rows[np.append(0, self.ends[:-1])]

    def extra_name(self, start: int, end: int) -> bytes:
        """What the name of a block of tokens [start, end) needs beside the tokens: the digests of
        the pictures with rows there."""
        first, last = np.searchsorted(self.rows, (start, end))
        if first == last:
            return b""
        found = np.searchsorted(self.ends, (first, last - 1), side="right")
        return b"".join(self.digests[found[0] : found[1] + 1])

    def end_of_chunk(self, start: int, end: int, may_start: bool) -> int:
        """The end of the longest chunk from `start` to at most `end` in which one picture starts,
        or none unless may_start: a step runs the tower once, so that others wait for one picture
        only."""
        begun = self.starts[(self.starts >= start) & (self.starts < end)]
        most = int(may_start)
        return int(begun[most]) if len(begun) > most else end

    def starts_in(self, start: int, end: int) -> bool:
        """Whether a picture starts in a chunk."""
        return self.end_of_chunk(start, end, may_start=False) < end
