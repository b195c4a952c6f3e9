"""What a model meets in the place of its caches and of SDPA during a packed forward."""
