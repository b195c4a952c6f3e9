"""Attention with the kernels of metal/."""
