"""Lets MLX's CUDA backend run the kernels of metal/: one source also runs on NVIDIA GPUs.

For developers, from a checkout: CUDA stands in for Metal, proves kernels and shows speed.
"""

from functools import partial

import mlx.core as mx

from .mends import flatten_quantised, split_gathers
from .translate import metal_kernel


def install() -> None:
    """Give MLX `mx.fast.metal_kernel` on CUDA, and mend two functions of its CUDA backend."""
    mx.fast.metal_kernel = metal_kernel  # type: ignore[assignment]
    mx.quantized_matmul = partial(flatten_quantised, mx.quantized_matmul)
    mx.gather_qmm = partial(split_gathers, mx.gather_qmm)
