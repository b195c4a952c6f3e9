"""Unmodified mlx-lm models, and the seam that connects them to the paged store."""

from vllm_metal_lite import backend as backend  # first: a fast BLAS must be loaded before MLX
