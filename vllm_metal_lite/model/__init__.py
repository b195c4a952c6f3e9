"""Unmodified mlx-lm models, and the seam that connects them to the paged store.

files/        the folder of a model: found, checked, read
ranks/        a rank's part of a model: a shard of each layer, or a stage of layers
seam/         what a packed forward replaces: calls, caches, MLX's functions
sequences/    modules that must see sequences
adapters/     modules of mlx-lm with code of their own for packed rows
find_layout.py, packed.py, trial.py, fit.py, usage.py     from caches to a mode that fits
loader.py     all of this, by name
"""

from vllm_metal_lite import backend as backend  # first: a fast BLAS must be loaded before MLX
