"""How a context is split, and how the attention over its splits is merged."""

import math

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, Kernel, Output, Template, grid_for
from vllm_metal_lite.kernels.store import TICKET

_MERGE_PARTITIONS = Kernel("merge_partitions", ["partial", "lse"], ["out"])

# The most splits of a context.
_MAX_SPLITS = 64


def num_splits(most: int, num_keys: int, min_keys: int) -> int:
    """The number of splits of num_keys: at most `most`, with at least min_keys keys each.

    A power of two, so that few variants of a compiled step exist.
    """
    splits = max(1, min(most, num_keys // min_keys, _MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


def lse_output(*shape: int) -> Output:
    """The output lse (B, H, splits) of a kernel.  It is also the next ticket, so it has at least
    MIN_ELEMENTS elements."""
    return (shape, mx.float32) if math.prod(shape) >= MIN_ELEMENTS else TICKET


def merge_partitions(partial: mx.array, lse: mx.array, dtype: mx.Dtype) -> mx.array:
    """Merge attention over splits: partial (B, H, splits, D), lse (B, H, splits) -> (B, H, D)."""
    batch, heads, splits, dim = partial.shape
    threads, _ = grid_for(dim)
    inputs = [partial.reshape(-1, splits, dim), lse.reshape(-1, splits)]
    template: Template = {"T": dtype, "V_DIM": dim, "THREADS": threads, "MAX_SPLITS": _MAX_SPLITS}
    grid, shape = (batch * heads, 1, 1), (batch, heads, dim)
    return _MERGE_PARTITIONS(inputs, template, grid, threads, [(shape, dtype)])[0]
