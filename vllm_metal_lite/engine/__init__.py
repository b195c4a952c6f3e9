"""Requests in, outputs out: the loop that runs steps."""

from vllm_metal_lite import backend as backend  # first: a fast BLAS must be loaded before MLX
