"""Unmodified mlx-lm models, and the seam that connects them to the paged store.

files/        the folder of a model: found, checked, read
ranks/        a rank's part of a model: a shard of each layer, or a stage of layers
seam/         what a packed forward replaces: caches, MLX's functions
sequences/    modules that must see sequences
adapters/     replaces modules of mlx-lm that the seam cannot serve
calls.py      changes or observes calls of single modules
weights.py    weights as the kernels take them
find_layout.py, packed.py, trial.py, fit.py, usage.py
              find a model's caches; run it packed; choose and test the mode
loader.py     loads a model by name
"""

from vllm_metal_lite import backend as backend  # first: a fast BLAS must be loaded before MLX
