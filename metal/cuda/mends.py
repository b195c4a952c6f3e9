"""Two functions of MLX's CUDA backend, mended: quantised products of packed rows and of experts."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

# From this many rows on, expanding the weights first is faster: 2,048 rows take 437 us, not 1,353.
_EXPANDED_ROWS = 1024


def flatten_quantised(
    original: Callable[..., mx.array],
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,
    **how: Any,
) -> mx.array:
    """mx.quantized_matmul of packed rows (N, 1, K), computed as one (N, K) product.

    MLX CUDA computes (N, 1, K) as N products, and each reads the weights: 64 rows of 2,560 by
    19,456 take 1,293 us, but 65 us as (N, K).
    """
    if x.shape[1:-1] not in ((), (1,)) or w.ndim != 2 or not transpose:
        return original(x, w, scales, biases, transpose, **how)
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if len(rows) >= _EXPANDED_ROWS:
        out = rows @ mx.dequantize(w, scales, biases, **how).T.astype(rows.dtype)
    else:
        out = original(rows, w, scales, biases, transpose, **how)
    return out.reshape(*x.shape[:-1], -1)


# CUDA's limit for the z dimension of a grid, in which MLX's gather_qmv counts pairs.
_MOST_PAIRS = 65535


def split_gathers(
    original: Callable[..., mx.array],
    x: mx.array,
    *arrays: Any,
    rhs_indices: mx.array | None = None,
    **how: Any,
) -> mx.array:
    """mx.gather_qmm for sorted pairs (row, expert), x (pairs, 1, K), at most _MOST_PAIRS at once.

    MLX CUDA launches more pairs with a grid that CUDA refuses: "cuGraphAddKernelNode: invalid
    argument" (`gather_qmv` in mlx/backend/cuda/quantized/qmm/qmv.cu).
    """
    pairs = rhs_indices is not None and x.ndim == 3 and rhs_indices.shape == (len(x),)
    if not pairs or len(x) <= _MOST_PAIRS:
        return original(x, *arrays, rhs_indices=rhs_indices, **how)
    starts = range(_MOST_PAIRS, len(x), _MOST_PAIRS)
    parts = zip(mx.split(x, starts), mx.split(rhs_indices, starts), strict=True)
    return mx.concatenate([original(a, *arrays, rhs_indices=i, **how) for a, i in parts])
