"""Attention by the kernels of metal/."""
