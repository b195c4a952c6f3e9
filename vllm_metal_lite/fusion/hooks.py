"""What a packed forward puts in the place of MLX's own functions, while it is being built.

`mx.fast.scaled_dot_product_attention` with a KVHandle for keys is paged attention (seam.py).  Where
kernels are in use, `mx.fast.rms_norm`, `mx.fast.rope` and projections leave a trace (traced.py),
and a residual sum is computed with the norm that follows it.  Products of few rows go through
`skinny_gemm` where that is faster, and take along the norm before them, and the residual sum or
SwiGLU after them.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.nn as nn

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import Attention, StepMetadata
from vllm_metal_lite.attention.heads import Heads
from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.traced import (
    Multiplied,
    Normed,
    Sum,
    Traced,
    heads_of,
    look,
    made_of,
    rows_of,
    up_to_date,
)
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.new_rows import Columns, HeadNorm, Rope
from vllm_metal_lite.kernels.skinny_gemm import MAX_NORMED_ROWS, RowNorm, fits
from vllm_metal_lite.model.seam.placeholders import KVHandle

_LOCK = threading.Lock()

# By the id of a Linear: its weight, and that seen as a transposed matrix.
Transposed = dict[int, tuple[mx.array, mx.array]]

# MLX CUDA multiplies (N, 1, K) by quantised weights as N products, each of which reads the weights:
# 64 rows of 2,560 by 19,456 take 1,293 us, and 65 as (N, K).  From some rows on it is quicker to
# expand the weights first: 2,048 rows take 1,353 us, and 437.
_EXPANDED_ROWS = 1024


@contextmanager
def hooks(
    attention: Attention,
    step: StepMetadata,
    transposed: Transposed,
    activations: Collection[ModuleType] = (),
) -> Iterator[None]:
    """One thread at a time: the names are the whole process's.  transposed: kept by the caller.
    activations: the modules by whose name `swiglu` the model calls mlx-lm's.
    """
    fast = mx.fast
    with _LOCK:
        hooked: list[tuple[Any, str, Callable]] = [
            (fast, "scaled_dot_product_attention", _attend(fast.scaled_dot_product_attention))
        ]
        if attention.fuses:
            hooked += [
                (fast, "rms_norm", _rms_norm(fast.rms_norm, attention.skinny_rows)),
                (fast, "rope", _rope(fast.rope, step.positions)),
                (
                    nn.Linear,
                    "__call__",
                    _linear(nn.Linear.__call__, transposed, attention.skinny_rows),
                ),
                (nn.QuantizedLinear, "__call__", _quantized_linear(nn.QuantizedLinear.__call__)),
            ]
            hooked += [(module, "swiglu", _swiglu(module.swiglu)) for module in activations]
        if backend.name() == "cuda":
            hooked.append((mx, "quantized_matmul", _quantized_matmul(mx.quantized_matmul)))
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


def _rms_norm(original: Callable, skinny_rows: range) -> Callable:
    def rms_norm(x, weight, eps, **kwargs):
        made, shape = made_of(x), x.shape[:-1]
        rows = x.size // x.shape[-1]
        # So few that each threadgroup of a product may normalise all of them.
        few = rows in skinny_rows and rows <= MAX_NORMED_ROWS
        if isinstance(made, Sum) and made.total is None:
            total = _with_product(made) if few else None
            if total is None:
                total, out = add_rms_norm(rows_of(made.x), rows_of(made.y), weight, eps)
                made.total = look(total, shape)
                return look(out, shape)
            made.total = look(total, shape)
        x = up_to_date(x)
        out = original(x, weight, eps, **kwargs)
        if isinstance(made, Heads):
            heads = made.normed(HeadNorm(weight, eps))
            return out if heads is None else Traced(out, heads)
        if few and x.ndim == 3 and weight is not None and weight.dtype == x.dtype:
            return Traced(out, Normed(rows_of(x), RowNorm(weight, eps)))
        return out

    return rms_norm


def _with_product(made: Sum) -> mx.array | None:
    """A sum (N, K) by the launch of the product that is one side of it; None if none is."""
    for product, other in ((made.y, made.x), (made.x, made.y)):
        multiplied = made_of(product)
        if isinstance(multiplied, Multiplied):
            return multiplied(residual=rows_of(other))
    return None


def _rope(original: Callable, positions: mx.array) -> Callable:
    def rope(x, dims, *, traditional, base, scale, offset, freqs=None, **kwargs):
        how = {"traditional": traditional, "base": base, "scale": scale, "freqs": freqs}
        out = original(x, dims, offset=offset, **how, **kwargs)
        if offset is not positions or x.ndim != 4 or x.shape[2] != 1:
            return out
        heads = heads_of(x).rotated(Rope(dims, traditional, base, scale, freqs))
        return out if heads is None else Traced(out, heads)

    return rope


def _linear(original: Callable, transposed: Transposed, skinny_rows: range) -> Callable:
    def linear(self: nn.Linear, x: mx.array) -> mx.array:
        rows = rows_of(x)
        if "bias" in self:
            return look(original(self, rows), x.shape[:-1])
        if len(rows) in skinny_rows and fits(rows, self["weight"]):
            made = made_of(x)
            normed = made if isinstance(made, Normed) else Normed(rows, None)
            product = Multiplied(normed, self["weight"])
            return look(product(), x.shape[:-1], product)
        weight, view = transposed.get(id(self), (None, None))
        if weight is not self["weight"]:  # a look that each step would take anew
            weight = self["weight"]
            view = weight.T
            mx.eval(view)
            transposed[id(self)] = weight, view
        return look(rows @ view, x.shape[:-1])

    return linear


def _swiglu(original: Callable) -> Callable:
    def swiglu(gate, up):
        of_gate, of_up = made_of(gate), made_of(up)
        if isinstance(of_gate, Columns) and isinstance(of_up, Columns):
            product, size = of_gate.made, gate.shape[-1]
            halves = (of_gate.start, of_up.start, of_gate.array.shape[-1]) == (0, size, 2 * size)
            if halves and of_gate.array is of_up.array and isinstance(product, Multiplied):
                return look(product(swiglu=True), gate.shape[:-1])
        return original(gate, up)

    return swiglu


def _quantized_linear(original: Callable) -> Callable:
    def linear(self: nn.QuantizedLinear, x: mx.array) -> mx.array:
        return look(original(self, rows_of(x)), x.shape[:-1])

    return linear


def _quantized_matmul(original: Callable) -> Callable:
    def quantized_matmul(x, w, scales, biases=None, transpose=True, **how):
        if x.ndim > 3 or x.shape[1:-1] not in ((), (1,)) or w.ndim != 2 or not transpose:
            return original(x, w, scales, biases, transpose, **how)
        rows = rows_of(x)
        if len(rows) >= _EXPANDED_ROWS:
            out = rows @ mx.dequantize(w, scales, biases, **how).T.astype(rows.dtype)
        else:
            out = original(rows, w, scales, biases, transpose, **how)
        return out.reshape(*x.shape[:-1], -1)

    return quantized_matmul
