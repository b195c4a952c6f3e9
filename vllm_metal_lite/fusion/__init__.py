"""Kernel fusion: joined projections, traced arrays and fused kernels.

Optional: the engine works without this package.
"""
