"""The kernels of metal/: their source, how each is launched, and the check that they are right."""
