"""Several launches of a model as one: joined projections, traced arrays, fused kernels.

A room on top of the core: the engine works without it.
"""
