"""The engine: takes requests, runs steps, returns outputs."""

from vllm_metal_lite import backend as backend  # first: loads a fast BLAS before MLX
