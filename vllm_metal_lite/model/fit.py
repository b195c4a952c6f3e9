"""How a model is run packed: found out when it is loaded, by trying, against the model itself.

1. Attention through the seam, recurrent layers as sequences (recurrent.py).
2. Where that fails, or its logits are not the model's own: attention a segment at a time too
   (kv_segments.py): slower, and general.
3. Where that fails as well the model is refused, by name and with the reason.
"""

import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal_lite.attention.kernels import KernelAttention
from vllm_metal_lite.attention.reference import ReferenceAttention
from vllm_metal_lite.attention.step import Attention, AttentionShape
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch import InputBatch
from vllm_metal_lite.errors import ModelLoadError, one_line
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model import handles, hooks, seam
from vllm_metal_lite.model.joined import Product
from vllm_metal_lite.model.layout import Layout
from vllm_metal_lite.model.packed import PackedModel

# Two requests, of 9 and 14 tokens: (computed before, computed now) in the steps of the trial.
# Prompts, then a decode beside a chunk, then decodes, then one decode and no other, for a step of
# one row may take kernels of its own.
_LENGTHS = (9, 14)
_STEPS = (
    ((0, 0), (4, 3)),
    ((4, 3), (1, 6)),
    ((5, 9), (1, 1)),
    ((6, 10), (1, 1)),
    *(((7, n), (0, 1)) for n in (11, 12, 13)),
    *(((n, 14), (1, 0)) for n in (7, 8)),
)
_BLOCK = 8

# How far the logits may be from the model's own, relative to their spread.  What goes wrong with
# attention or states moves them by about their spread, in most rows.  Rounding to 16 bits moves
# them by up to a tenth; by half where it sends a row to another expert, but that is a row in ten:
# so there the median counts.
_16_BIT = (mx.float16, mx.bfloat16)
_LIMIT, _LIMIT_16_BIT = 0.05, 0.25

# Where a model comes that uses K and V, or a mask, as arrays.
_SEAM = tuple(module.__name__ for module in (handles, hooks, seam))


class _Observer(ReferenceAttention):
    """Notes how a model attends."""

    def __init__(self, store: PagedStore) -> None:
        super().__init__(store)
        self.shapes: dict[AttentionShape, None] = {}

    def attend(self, layer, q, step, **how):
        _, kv_heads, k_dim = self.store.keys[layer].shape
        self.shapes[AttentionShape(
            q.shape[1], kv_heads, k_dim, self.store.values[layer].shape[2], q.dtype,
            how.get("window"), how.get("softcap"), how.get("sinks") is not None, "q_pe" in how,
            how.get("chunk"),
        )] = None  # fmt: skip
        return super().attend(layer, q, step, **how)


class _Problem(NamedTuple):
    """text: one line.  is_unexpected: an exception that is not due to how the model is written."""

    text: str
    is_unexpected: bool = False


class _Trial:
    """A model's own logits of two sequences, and how far packed ones may be from them."""

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        self.sequences = [rng.integers(0, vocab_size, n) for n in _LENGTHS]
        self.own = [_native(model, s) for s in self.sequences]
        exact = all(w.dtype not in _16_BIT for _, w in tree_flatten(model.parameters()))
        self.limit, self.statistic = (_LIMIT, np.max) if exact else (_LIMIT_16_BIT, np.median)

    def problem(self, packed: PackedModel, attention: ReferenceAttention) -> _Problem | None:
        """Why a packed model does not fit, None if it does.

        attention: over an unused store of 4 blocks.
        """
        try:
            error = _trial(packed, attention, self.sequences, self.own, self.statistic)
        except Exception as e:
            return _Problem(f"{type(e).__name__}: {one_line(e)}", _is_unexpected(e))
        if not error > self.limit:  # NaN: the model's own
            return None
        return _Problem(f"its packed logits are {error:.2g} of their spread away from mlx-lm's own")


def fit(
    model: nn.Module, layout: Layout, model_type: str, products: Sequence[Product] = ()
) -> tuple[PackedModel, list[AttentionShape]]:
    """The model, ready for packed steps, and the shapes that its attention has in the seam.

    Trying it also evaluates what models compute lazily when they are made and keep outside of their
    parameters (RoPE's frequencies): MLX can only do so in the thread that made it.
    """
    try:
        trial = _Trial(model, layout.vocab_size)
    except Exception as e:
        raise ModelLoadError(f"mlx-lm cannot run this {model_type}: {one_line(e)}") from e
    last = None  # what is wrong with the form before
    for _ in ("packed", "by segment"):
        packed = PackedModel(model, layout, last and last.text, products)
        attention = _Observer(PagedStore(layout.specs, 4, _BLOCK))
        problem = trial.problem(packed, attention)
        if problem is None:
            if last and last.is_unexpected:
                warnings.warn(
                    f"attention of this {model_type} failed unexpectedly, and now runs a segment "
                    f"at a time, which is slower: {last.text}. Please report this.",
                    stacklevel=2,
                )
            return packed, list(attention.shapes)
        last = problem
    raise ModelLoadError(f"the architecture {model_type} is not supported: {last.text}")


def _is_unexpected(e: Exception) -> bool:
    """Whether our code, or MLX called from there, raised it, not a model (or the seam in its place)
    that uses what stands for K and V in a way that was not foreseen."""
    *_, (frame, _) = traceback.walk_tb(e.__traceback__)
    name = frame.f_globals["__name__"]
    return name.startswith("vllm_metal_lite.") and name not in _SEAM


def check_fusing(packed: PackedModel, attention: Attention) -> None:
    """Do without fused launches, and say so, if with them the logits are not the model's own.

    Each kernel was checked by itself; this is whether they stand for what this model computes.
    Products of few rows are tried both ways: larger steps go without `skinny_gemm` in any case.
    """
    if not attention.fuses:
        return
    trial = _Trial(packed.model, packed.layout.vocab_size)

    def problem(skinny_rows: range) -> _Problem | None:
        store = PagedStore(packed.attention_specs, 4, attention.store.block_size)
        like = KernelAttention(store, attention.prefill, skinny_rows=skinny_rows)
        return trial.problem(packed, like)

    if wrong := problem(range(0)):
        attention.fuses, attention.skinny_rows = False, range(0)
        warnings.warn(f"fused launches do not suit this model: {wrong.text}", stacklevel=2)
    elif attention.skinny_rows and (wrong := problem(attention.skinny_rows)):
        attention.skinny_rows = range(0)
        message = f"products by skinny_gemm do not suit this model: {wrong.text}"
        warnings.warn(message, stacklevel=2)


def _trial(
    packed: PackedModel,
    attention: ReferenceAttention,
    sequences: list[np.ndarray],
    own: list[np.ndarray],
    statistic: Callable,
) -> float:
    """Difference of the packed logits to the model's own, relative to their spread.

    Of the worst kind of segment: prompt, chunk, decode, or decode in a step of one row.  statistic:
    what counts of its rows.
    """
    size = attention.store.block_size
    inputs = InputBatch(2, 2 * size, size, len(attention.store.num_blocks))
    rows = np.array([inputs.add(s, len(s)) for s in sequences])
    for row in rows:
        inputs.append_blocks(row, [2 * row + 1, 2 * row])
    errors: dict[str, list[float]] = {}
    for computed, scheduled in _STEPS:
        counts = np.array(scheduled)
        now = counts > 0
        batch = inputs.pack(rows[now], np.array(computed)[now], counts[now])
        step = attention.prepare(batch, batch.num_tokens)
        logits = packed(step, attention, mx.arange(batch.num_tokens)).astype(mx.float32)
        mx.eval(logits, attention.state, attention.store.states.arrays)
        row = iter(np.array(logits))
        for expected, start, count in zip(own, computed, scheduled, strict=True):
            kind = "prompt" if start == 0 else "chunk" if count > 1 else "decode"
            kind = "one row" if batch.num_tokens == 1 else kind
            for position in range(start, start + count):
                errors.setdefault(kind, []).append(_distance(next(row), expected[position]))
    return float(max(statistic(e) for e in errors.values()))


def _distance(got: np.ndarray, expected: np.ndarray) -> float:
    finite = np.isfinite(expected)  # some models forbid tokens with -inf
    if not finite.any():  # broken weights: each request says so
        return float("nan")
    difference = got[finite] - expected[finite]
    return float(np.sqrt(np.mean(difference**2)) / expected[finite].std())


def _native(model: nn.Module, tokens: np.ndarray) -> np.ndarray:
    logits = model(mx.array(tokens)[None], cache=make_prompt_cache(model))[0]
    return np.array(logits.astype(mx.float32))
