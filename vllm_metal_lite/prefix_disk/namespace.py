"""The namespace of a model: a digest of everything that the bytes of a block depend on.

The weights count as they lie in memory, after they were cast, merged or quantised, and every word
of them counts.  The times of files do not count, so copies of a model share their prefixes.
"""

import json
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import base

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.source import FOLDER
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.runner.pictures import NoEyes
from vllm_metal_lite.scheduler.kv_groups import KVGroup

NO_EYES = NoEyes("")


def namespace(
    model: LoadedModel,
    groups: Sequence[KVGroup],
    block_size: int,
    attention: str = "auto",
    eyes: NoEyes = NO_EYES,
) -> bytes:
    """The namespace, 16 bytes.  Models that share one compute equal blocks for equal names."""
    packed = model.packed
    facts = {
        "versions": (version("mlx"), version("mlx-lm"), _code_digest()),
        "config": json.dumps(model.config, sort_keys=True, default=repr),
        "attention": attention,
        "rows": model.kv_specs,
        "groups": [(group.layers, group.window) for group in groups],
        "states": packed.layout.states,
        "block_size": block_size,
        "rank": (model.ranks.rank, model.ranks.size),
        "pictures": eyes.settings,
    }
    digest = blake2b(repr(sorted(facts.items())).encode(), digest_size=16)
    weights: Any = [*tree_flatten(packed.model.parameters()), *eyes.weights]
    sums = [_sums(array) for _, array in weights]
    mx.eval(sums)
    for (name, array), of_array in zip(weights, sums, strict=True):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        for words in of_array:
            digest.update(np.array(words).tobytes())
    return digest.digest()


def _sums(array: mx.array) -> list[mx.array]:
    """The sums of the rows and of the columns of an array, in words.

    One value that changes, or one row that moves, always changes a sum.  The device reads the
    words at the speed of its memory, and copies none.
    """
    if not array.size:
        return []
    rows = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1)
    num_bytes = rows.nbytes // len(rows)
    word = next(w for w in (mx.uint32, mx.uint16, mx.uint8) if num_bytes % w.size == 0)
    words = rows.view(word)
    return [words.sum(axis=1), words.sum(axis=0)]


@cache
def _code_digest() -> bytes:
    """Hash the source of this package and of mlx-lm's models: a checkout may change them without a
    new version."""
    digest = blake2b(digest_size=16)
    for folder in Path(__file__).parents[1], FOLDER, Path(base.__file__).parent:
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".py", ".metal", ".h"):
                digest.update(file.read_bytes())
    return digest.digest()
