"""The namespace of a model: a digest of everything that the bytes of a block depend on.

The weights are sampled as they lie in memory, after they were cast, merged or quantised: a few
hundred values of every array, with its name, shape and dtype.  Two models get one namespace only if
they differ in nothing but values that are not sampled.
"""

from collections.abc import Sequence
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

import numpy as np
from mlx.utils import tree_flatten

from vllm_metal_lite import __version__
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.scheduler.kv_groups import KVGroup

# Increase it when block names, file keys or file contents change.
_CONTENT_FORMAT = 1
_SAMPLES = 256


def namespace(model: LoadedModel, groups: Sequence[KVGroup], block_size: int) -> bytes:
    """16 bytes.  Models with equal namespaces compute equal blocks for equal names."""
    packed = model.packed
    args = getattr(packed.model, "args", None)
    facts = {
        "format": _CONTENT_FORMAT,
        "versions": (__version__, version("mlx"), version("mlx-lm")),
        "type": model.model_type,
        "args": getattr(args, "__dict__", args),
        "rows": model.kv_specs,
        "groups": [(group.layers, group.window) for group in groups],
        "states": packed.layout.states,
        "block_size": block_size,
    }
    digest = blake2b(repr(sorted(facts.items())).encode(), digest_size=16)
    weights: Any = tree_flatten(packed.model.parameters())
    samples = [_sample(array) for _, array in weights]
    mx.eval(samples)
    for (name, array), sample in zip(weights, samples, strict=True):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.array(sample).tobytes())
    return digest.digest()


def _sample(array: mx.array) -> mx.array:
    flat = array.reshape(-1)
    return flat[:: max(flat.size // _SAMPLES, 1)].view(mx.uint8)
