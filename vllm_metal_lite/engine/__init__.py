"""Requests, their scheduling, and the loop that runs them."""

from vllm_metal_lite import backend as backend  # first: a fast BLAS must be loaded before MLX
