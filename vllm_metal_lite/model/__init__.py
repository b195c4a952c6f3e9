"""mlx-lm models, unmodified, and the seam through which they meet the paged store."""

from vllm_metal_lite import backend as backend  # first: a fast BLAS must be loaded before MLX
