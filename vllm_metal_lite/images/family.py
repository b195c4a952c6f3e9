"""A family of models that see, and a picture that is prepared for its tower."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.images.towers import Grid, Tower


class Prepared(NamedTuple):
    """A picture, resized and cut into patches.

    patches: (P, values) uint8.  grid: (height, width) in patches.  merged: (height, width) of the
    rows that the language model gets.  digest: names the picture.
    tiles: (height, width) in tiles, if the tower also sees the picture in parts; the patches of
    tiles come first.  tile: the grid of a tile.  rows_of_tile: the number of rows of a tile.
    """

    patches: np.ndarray
    grid: Grid
    merged: Grid
    digest: bytes = b""
    tiles: Grid = (0, 0)
    tile: Grid = (0, 0)
    rows_of_tile: int = 0

    @property
    def num_rows(self) -> int:
        return self.merged[0] * self.merged[1] + self.tiles[0] * self.tiles[1] * self.rows_of_tile

    def views(self, patches: mx.array) -> list[tuple[mx.array, Grid]]:
        """The patches as the tower takes them: all of one grid at a time."""
        if self.tile == self.grid:
            return [(patches, self.grid)]
        end = self.tiles[0] * self.tiles[1] * self.tile[0] * self.tile[1]
        views = (patches[:end], self.tile), (patches[end:], self.grid)
        return [(part, grid) for part, grid in views if len(part)]


@dataclass(frozen=True)
class Family:
    """placeholder: what the chat template writes for a picture.  image_token_id: the token of each
    of its rows.  processor: the name of the class that prepares pictures with Pillow, from
    transformers, otherwise from processors.py.  options: arguments of each call.
    text_of: the text of a prepared picture, with one image token a row.
    rotates_by_grid: whether rows are rotated by their place in the picture (M-RoPE).
    rotates_in_turns: whether the frequencies of time, row and column take turns.
    sees_whole_picture: whether rows of a picture see later rows of it: in "all" layers, in those
    with a "sliding" window, or in none ("").
    embed_scale: the model multiplies embeddings by it, so features are divided by it.
    channels_last: whether the three values of a pixel follow each other in a patch.
    """

    tower: type[Tower]
    placeholder: str
    image_token_id: int
    processor: str
    prepare: Callable[[Mapping[str, np.ndarray]], Prepared]
    text_of: Callable[[Prepared], str]
    options: Mapping[str, Any] = field(default_factory=dict)
    rotates_by_grid: bool = False
    rotates_in_turns: bool = True
    sees_whole_picture: str = ""
    embed_scale: float = 1.0
    channels_last: bool = False


def cut(pixels: np.ndarray, patch: int) -> tuple[np.ndarray, Grid]:
    """(3, height, width) pixels -> (patches (P, 3 * patch * patch), grid).  Pixels beyond the last
    whole patch are left out."""
    channels, height, width = pixels.shape
    grid = (height // patch, width // patch)
    pixels = pixels[:, : grid[0] * patch, : grid[1] * patch]
    parts = pixels.reshape(channels, grid[0], patch, grid[1], patch).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(parts).reshape(grid[0] * grid[1], -1), grid
