"""The reference attention: calls of MLX's SDPA, or of its parts, on every backend."""
