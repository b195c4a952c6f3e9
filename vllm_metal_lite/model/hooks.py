"""What a packed forward puts in the place of MLX's own functions, while it is being built.

`mx.fast.scaled_dot_product_attention` with a KVHandle for keys is paged attention (seam.py).
Where kernels are in use, `mx.fast.rms_norm`, `mx.fast.rope` and projections leave a trace
(traced.py), and
a residual sum is computed with the norm that follows it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.attention.heads import Heads
from vllm_metal_lite.attention.step import Attention, StepMetadata
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.norm import add_rms_norm
from vllm_metal_lite.kernels.rope import HeadNorm, Rope
from vllm_metal_lite.model.handles import KVHandle
from vllm_metal_lite.model.traced import Projected, Sum, Traced, heads_of, made_of, up_to_date

_LOCK = threading.Lock()


@contextmanager
def hooks(attention: Attention, step: StepMetadata) -> Iterator[None]:
    """One thread at a time: the names are the whole process's."""
    fast = mx.fast
    hooked: list[tuple[Any, str, Callable]] = [
        (fast, "scaled_dot_product_attention", _attend(fast.scaled_dot_product_attention))
    ]
    with _LOCK:
        if attention.fuses:
            hooked += [
                (fast, "rms_norm", _rms_norm(fast.rms_norm)),
                (fast, "rope", _rope(fast.rope, step.positions)),
                (nn.Linear, "__call__", _project(nn.Linear.__call__)),
                (nn.QuantizedLinear, "__call__", _project(nn.QuantizedLinear.__call__)),
            ]
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in hooked]
        for owner, name, function in hooked:
            setattr(owner, name, function)
        try:
            yield
        finally:
            for owner, name, function in originals:
                setattr(owner, name, function)


def _attend(original: Callable) -> Callable:
    def attend(q, k, v, *, scale, mask=None, sinks=None, **kwargs):
        if not isinstance(k, KVHandle):
            return original(q, k, v, scale=scale, mask=mask, sinks=sinks, **kwargs)
        return k.cache.attend(q, scale, mask, sinks)

    return attend


def _rms_norm(original: Callable) -> Callable:
    def rms_norm(x, weight, eps, **kwargs):
        made = made_of(x)
        if isinstance(made, Sum) and made.total is None:
            made.total, out = add_rms_norm(made.x, made.y, weight, eps)
            return out
        out = original(up_to_date(x), weight, eps, **kwargs)
        heads = made.normed(HeadNorm(weight, eps)) if isinstance(made, Heads) else None
        return out if heads is None else Traced(out, heads)

    return rms_norm


def _rope(original: Callable, positions: mx.array) -> Callable:
    def rope(x, dims, *, traditional, base, scale, offset, freqs=None, **kwargs):
        how = {"traditional": traditional, "base": base, "scale": scale, "freqs": freqs}
        out = original(x, dims, offset=offset, **how, **kwargs)
        if offset is not positions or x.ndim != 4 or x.shape[2] != 1:
            return out
        heads = heads_of(x).rotated(Rope(dims, traditional, base, scale, freqs))
        return out if heads is None else Traced(out, heads)

    return rope


def _project(original: Callable) -> Callable:
    def project(self: nn.Module, x: mx.array) -> mx.array:
        return Traced(original(self, x), Projected())

    return project
