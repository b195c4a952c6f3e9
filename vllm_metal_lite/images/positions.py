"""The positions by which rows of a prompt with pictures are rotated (M-RoPE).

Text counts on all three axes.  A picture's row has its time (0), row and column in the merged grid
as offsets from the position where the picture starts; the text after it starts one behind the
largest of these.  As in transformers' `get_rope_index` of Qwen3-VL, for pictures.
"""

from collections.abc import Sequence

import numpy as np


def axes(num_tokens: int, starts: Sequence[int], grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """The positions (3, num_tokens) int32 of a prompt.

    starts: the first token of each picture.  grids: (height, width) of its rows.
    """
    positions = np.empty((3, num_tokens), np.int32)
    token = at = 0
    for start, (height, width) in zip(starts, grids, strict=True):
        positions[:, token:start] = np.arange(at, at + start - token)
        at += start - token
        row, column = np.divmod(np.arange(height * width), width)
        token = start + height * width
        positions[:, start:token] = at + np.stack([np.zeros_like(row), row, column])
        at += max(height, width)
    positions[:, token:] = np.arange(at, at + num_tokens - token)
    return positions


def axis_of_frequency(sections: Sequence[int], in_turns: bool = True) -> np.ndarray:
    """(sum of sections,) the axis of each frequency: 0 time, 1 row, 2 column.

    sections: how many frequencies time, row and column have.  in_turns: the axes take turns, as in
    Qwen3-VL; otherwise all frequencies of one axis come together, as in Qwen2-VL and GLM-V.
    """
    index = np.arange(sum(sections))
    if not in_turns:
        return np.repeat(np.arange(3, dtype=np.int32), sections)
    axis = np.zeros(len(index), np.int32)
    for i in (1, 2):
        axis[(index % 3 == i) & (index < 3 * sections[i])] = i
    return axis
