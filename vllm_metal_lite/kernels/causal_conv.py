"""The short causal convolution in front of a recurrent layer, over packed rows."""

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.common import grid_for, unused
from vllm_metal_lite.kernels.launch import Kernel, Template
from vllm_metal_lite.kernels.segments import check_pool

_CAUSAL_CONV = Kernel(
    "causal_conv",
    ["x", "weight", "bias", "segments", "tiles", "states", "token"],
    ["y", "next_token"],
)

# Rows of a tile: enough that reading the rows before it costs little.
TILE_ROWS = 16
# The longest convolution: the rows before a row stay in registers.
MAX_KERNEL_SIZE = 8


def plan_conv_tiles(segments: np.ndarray) -> np.ndarray:
    """Split segments (S, ...) of `plan_segments` into tiles (T, 2) int32 for `causal_conv`.

    A tile is (segment, its first packed row).  Every segment has at least one.  T depends only on S
    and on the number of packed rows.
    """
    begins, rows = segments[:, 0], segments[:, -2] - segments[:, 0]
    counts = np.maximum(-(-rows // TILE_ROWS), 1)
    ends = np.cumsum(counts)
    num_rows = int(segments[-1, -2])
    # MLX passes arrays of fewer than 8 elements to a kernel in another address space.
    tiles = np.empty((max(num_rows // TILE_ROWS + len(segments), 4), 2), np.int32)
    tiles[ends[-1] :] = len(segments) - 1, num_rows  # past all rows: nothing to do
    real = tiles[: ends[-1]]
    real[:, 0] = np.repeat(np.arange(len(segments)), counts)
    real[:, 1] = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    real[:, 1] = real[:, 1] * TILE_ROWS + np.repeat(begins, counts)
    return tiles


def causal_conv(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    states: mx.array,
    segments: mx.array,
    tiles: mx.array,
    token: mx.array,
    *,
    silu: bool,
) -> tuple[mx.array, mx.array]:
    """Depthwise causal convolution of packed rows x (N, C) -> (N, C), the token.

    weight: (C, K), K from 2 to 8, or as `mx.conv1d` takes it, (C, K, 1).  bias: (C,) or None.
    states: the pool (slots, K - 1, C), written in place: the rows before a segment are read from
    its initial slot, and its last rows, older ones included, go to the slots that `segments` names.
    segments: from `plan_segments`.  tiles: from `plan_conv_tiles`.  silu: apply x * sigmoid(x) to
    the result, which is rounded once.  Rows of padding give zeros.  Raises ValueError for other
    shapes, or arrays of unlike types.
    """
    (_, channels), size = x.shape, weight.shape[1]
    if weight.shape[:1] + weight.shape[2:] not in ((channels,), (channels, 1)):
        raise ValueError(f"weight {weight.shape} is not ({channels}, K)")
    if not 2 <= size <= MAX_KERNEL_SIZE:
        raise ValueError(f"kernel size {size} is not from 2 to {MAX_KERNEL_SIZE}")
    for name, array in (("weight", weight), ("bias", bias)):
        if array is not None and array.dtype != x.dtype:
            raise ValueError(f"{name} is {array.dtype}, but x is {x.dtype}")
    if channels < 8:  # MLX passes arrays of fewer elements in another address space
        raise ValueError(f"{channels} channels are fewer than 8")
    check_pool(states, (size - 1, channels), x.dtype)
    threads, groups = grid_for(channels)
    template: Template = {
        "T": x.dtype, "CHANNELS": channels, "K": size, "ROWS": TILE_ROWS,
        "BIAS": bias is not None, "SILU": silu,
    }  # fmt: skip
    y, token = _CAUSAL_CONV(
        [x, weight, unused() if bias is None else bias, segments, tiles, states, token],
        template, (groups, tiles.shape[0], 1), threads, [x.shape, (1,)], [x.dtype, mx.float32],
    )  # fmt: skip
    return y, token
