"""Attention by MLX's SDPA, cut into calls: the reference, on every backend."""
