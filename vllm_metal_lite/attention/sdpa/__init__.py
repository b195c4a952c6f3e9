"""Attention by MLX's SDPA, on every backend: the reference, and gathered prompts of the kernels."""
