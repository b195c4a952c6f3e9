"""A step's arrays, brought to the device together.

What MLX CUDA makes of a numpy array lies in memory that host and device share page by page, and
whoever touches a page next has to fetch it: the device waits about 90 us for each array, the host
half of that.  In one piece all of them cost what one does.
"""

from typing import Any

import numpy as np
from mlx.utils import tree_flatten, tree_map

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx

_ALIGNED = 4  # elements, for kernels read 16 bytes at once


def upload(tree: Any) -> Any:
    """A tree of int32 arrays (or None) as MLX arrays; on CUDA all of them are looks at one."""
    if backend.name() != "cuda":  # nothing to be saved
        return tree_map(lambda a: None if a is None else mx.array(a), tree)
    arrays = [a for _, a in tree_flatten(tree) if a is not None]
    if not arrays:
        return tree
    ends = np.cumsum([-(-a.size // _ALIGNED) * _ALIGNED for a in arrays])
    whole = np.zeros(ends[-1], np.int32)
    for array, end in zip(arrays, ends, strict=True):
        start = end - -(-array.size // _ALIGNED) * _ALIGNED
        whole[start : start + array.size] = array.reshape(-1)
    parts = iter(mx.split(mx.array(whole), ends[:-1].tolist()))

    def look(array: np.ndarray | None) -> mx.array | None:
        return None if array is None else next(parts)[: array.size].reshape(array.shape)

    return tree_map(look, tree)
