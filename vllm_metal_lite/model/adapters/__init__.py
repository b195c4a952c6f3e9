"""Adapted mlx-lm modules, which use the seam instead of their own attention code."""
