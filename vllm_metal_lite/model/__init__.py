"""Unmodified mlx-lm models, and the seam that connects them to the paged store.

files/        the folder of a model: found, checked, read
seam/         replaces caches and MLX's functions in a packed forward; calls modules that must see
              sequences
adapters.py   replaces modules of mlx-lm that the seam cannot serve
calls.py      changes or observes calls of single modules
layer_weights.py
              types of weights; the weights of layers as the kernels take them
layout.py     finds a model's caches, and the modules that use them
packed.py     runs a model over packed rows
shards.py, stages.py
              the part of a model that one rank has: a shard of each layer, or a stage of layers
trial.py      tests and chooses the mode
usage.py      notes the operations of a model
loader.py     loads a model by name: LoadedModel
"""

from vllm_metal_lite import backend as backend  # first: a fast BLAS must be loaded before MLX
