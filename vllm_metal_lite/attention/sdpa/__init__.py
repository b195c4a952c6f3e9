"""The reference attention: MLX's SDPA, or MLX's products and softmax, on every backend."""
