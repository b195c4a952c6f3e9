"""Modules of mlx-lm that ask the seam instead of computing by hand."""
