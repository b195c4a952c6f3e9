"""The kernels of metal/: their source, their launches, and remembered findings about them."""
