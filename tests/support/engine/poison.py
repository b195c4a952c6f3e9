"""Writes NaN to slots that no request may read."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.kv.state_store import StateStore
from vllm_metal_lite.kv.store import PagedStore


def poison(store: PagedStore, keep: Sequence[np.ndarray]) -> None:
    """Write NaN to all other slots.  keep: for each KV group, (num_slots,) bool."""
    masks = [mx.array(k)[:, None, None] for k in keep]
    for arrays in (store.keys, store.values):
        for layer, a in enumerate(arrays):
            nan = None
            if mx.issubdtype(a.dtype, mx.floating):
                nan = float("nan")
            elif store.specs[layer].bits:  # a scale of all ones is NaN too
                nan = 0xFFFFFFFF
            if nan is not None:
                mask = masks[store.group_of[layer]]
                arrays[layer] = mx.where(mask, a, mx.array(nan, a.dtype))
    mx.eval(store.arrays)


def poison_states(store: StateStore, keep: Collection[int]) -> None:
    """Write NaN to all other state slots, or a wrong number where the dtype has no NaN."""
    kept = np.isin(np.arange(store.num_slots), list(keep))
    for key, a in store._arrays.items():
        wrong = float("nan") if mx.issubdtype(a.dtype, mx.floating) else 7
        mask = mx.array(kept).reshape(-1, *[1] * (a.ndim - 1))
        store._arrays[key] = mx.where(mask, a, mx.array(wrong, a.dtype))
    mx.eval(store.arrays)


def poison_free_blocks(engine: LLMEngine) -> None:
    """From now on every block that is neither owned nor cached is NaN when a step begins."""
    execute, store = engine.runner.execute, engine.runner.attention.store

    def poisoned(*args: Any) -> Any:
        keep = []
        for pool in engine.scheduler.kv.pools:
            full = np.ones(pool.num_blocks + 1, bool)
            full[[*pool._free, -1]] = False
            keep.append(np.repeat(full, store.block_size))
        poison(store, keep)
        return execute(*args)

    engine.runner.execute = poisoned
