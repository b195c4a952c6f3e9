"""Are the kernels right and fast on this device?

A room on top of the core: the engine works without it, and then trusts the kernels.
"""
