"""The reference attention: calls of MLX's SDPA, on every backend."""
