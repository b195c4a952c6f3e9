"""The kernels of metal/: their source, how each is launched, and what was found out about them."""
