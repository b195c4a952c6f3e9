"""The short causal convolution in front of a recurrent layer, over packed rows."""

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns, columns_template
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, Kernel, Template, check_array, grid_for
from vllm_metal_lite.kernels.store import TICKET

_CAUSAL_CONV = Kernel(
    "causal_conv",
    ["x", "weight", "bias", "segments", "tiles", "states", "ticket"],
    ["y", "next_ticket"],
)

# A tile has enough rows that reading the rows before it costs little.
TILE_ROWS = 16


def plan_conv_tiles(segments: np.ndarray) -> np.ndarray:
    """Split segments (S, ...) of `pack_segments` into tiles (T, 2) int32 for `causal_conv`.

    A tile is (segment, its first packed row).  Every segment has at least one tile.  T depends
    only on S and on the number of packed rows.
    """
    begins, rows = segments[:, 0], segments[:, -2] - segments[:, 0]
    counts = np.maximum(-(-rows // TILE_ROWS), 1)
    ends = np.cumsum(counts)
    num_rows = int(segments[-1, -2])
    total = max(num_rows // TILE_ROWS + len(segments), MIN_ELEMENTS // 2)
    tiles = np.empty((total, 2), np.int32)
    tiles[ends[-1] :] = len(segments) - 1, num_rows  # past all rows: nothing to do
    real = tiles[: ends[-1]]
    real[:, 0] = np.repeat(np.arange(len(segments)), counts)
    real[:, 1] = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    real[:, 1] = real[:, 1] * TILE_ROWS + np.repeat(begins, counts)
    return tiles


def causal_conv(
    x: Columns,
    weight: mx.array,
    bias: mx.array | None,
    states: mx.array,
    segments: mx.array,
    tiles: mx.array,
    ticket: mx.array,
    *,
    silu: bool,
) -> tuple[mx.array, mx.array]:
    """Depthwise causal convolution of C columns of N packed rows -> (N, C), the ticket.

    weight: (C, K) of the type of x; or (C, K, 1), as `mx.conv1d` takes it.
    bias: (C,) or None.
    states: the store (slots, K - 1, C), written in place: the rows before a segment are read from
    its initial slot, and its last rows, older ones included, go to the slots that `segments` names.
    segments: from `pack_segments`.  tiles: from `plan_conv_tiles`.  silu: apply x * sigmoid(x) to
    the result, which is rounded once.  Rows of padding give zeros.
    """
    (rows, channels, size), dtype = (len(x.array), *weight.shape[:2]), weight.dtype
    columns = columns_template("x", x, rows, channels, dtype)
    check_array("bias", bias, (channels,), dtype)
    check_array("states", states, (len(states), size - 1, channels), dtype)
    threads, groups = grid_for(channels)
    template: Template = columns | {"T": dtype, "CHANNELS": channels, "K": size, "ROWS": TILE_ROWS}
    template |= {"BIAS": bias is not None, "SILU": silu}
    inputs = [x.array, weight, bias, segments, tiles, states, ticket]
    grid, outputs = (groups, len(tiles), 1), [((rows, channels), dtype), TICKET]
    y, ticket = _CAUSAL_CONV(inputs, template, grid, threads, outputs)
    return y, ticket
