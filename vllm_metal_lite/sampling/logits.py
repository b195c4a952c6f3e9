"""Sampling operations on logits, as functions of arrays.

Every function treats rows independently.  `x` is (T, V) float32; a per-row value is (T, 1).
Top-k, top-p and min-p become one threshold per row, so sorted rows are never unsorted: a token
stays iff its logit is not below the threshold.  Tokens that tie with the last token kept also stay
(as in vLLM's top-k; vLLM's top-p cuts ties in its own order).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps

import numpy as np

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx

# Tokens per block in the search for the k largest logits.
_BLOCK = 64


def column(values: np.ndarray) -> mx.array:
    """Copy (T,) from the host to (T, 1) on the device."""
    return mx.array(values[:, None])


def row_numbers(rows: np.ndarray, num_rows: int) -> mx.array | None:
    """Ascending row numbers, on the device; None if they cover all rows."""
    return mx.array(rows.astype(np.int32)) if len(rows) < num_rows else None


def fused(fn: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Fuse `fn` into one kernel.  Not on a CPU, where MLX would invoke a C++ compiler."""
    compiled = cache(lambda: mx.compile(fn, shapeless=True))

    @wraps(fn)
    def call(*args: mx.array) -> mx.array:
        return fn(*args) if backend.is_cpu() else compiled()(*args)

    return call


@fused
def penalize_repetition(x: mx.array, seen: mx.array, penalty: mx.array) -> mx.array:
    """Make tokens of the prompt and the output less likely if the penalty is above 1.

    seen: (T, V) uint32, see `Penalties`; penalty: (T, 1), 1 for a row without one.
    """
    return mx.where(seen > 0, mx.where(x > 0, x / penalty, x * penalty), x)


@fused
def penalize_frequency(
    x: mx.array, seen: mx.array, frequency: mx.array, presence: mx.array
) -> mx.array:
    """Make generated tokens less likely, by their count and by their presence.

    seen: (T, V) uint32, see `Penalties`; frequency, presence: (T, 1), 0 for a row without one.
    """
    return x - frequency * (seen >> 1) - presence * (seen > 1)


def in_blocks(x: mx.array) -> mx.array:
    """Reshape (T, V) to (T, blocks, _BLOCK); -inf pads the last block."""
    if x.shape[1] % _BLOCK:
        x = mx.pad(x, [(0, 0), (0, -x.shape[1] % _BLOCK)], constant_values=-mx.inf)
    return x.reshape(len(x), -1, _BLOCK)


def is_small(k: int | np.ndarray, vocab_size: int) -> bool | np.ndarray:
    """Whether the k largest logits of a row can be found by sorting less than half of it."""
    return 2 * k * _BLOCK < vocab_size


def candidates(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """A subset of each row's tokens, in order of id, that includes the k most likely.

    Returns logits (T, C) and token ids (T or 1, C).  The k blocks with the largest maxima hold the
    k largest logits (ties: the lowest ids), so only C = k * 64 values need sorting after one pass.
    MLX's partition sorts the whole row on Metal.  C = V unless k `is_small`.
    """
    vocab_size = x.shape[1]
    if not is_small(k, vocab_size):
        return x, mx.arange(vocab_size)[None]
    x = in_blocks(x)
    blocks = mx.sort(mx.argsort(-x.max(-1), -1)[:, :k], -1)[:, :, None]
    ids = blocks * _BLOCK + mx.arange(_BLOCK)
    return mx.take_along_axis(x, blocks, 1).flatten(1), ids.flatten(1)


@dataclass(frozen=True)
class Filters:
    """Filters of R rows whose thresholds need the same amount of sorting.

    rows: (R,) int32; None: every row.  k: how many of a row's largest logits must be sorted; 0 if
    none.  The rest are (R, 1), or None if unused.  Listed with the value that turns each filter
    off: temperature; min_p: temperature * log(min_p), -inf; top_k: int32 -k, -V; top_p: 1 - top_p,
    -1.
    """

    rows: mx.array | None
    k: int
    temperature: mx.array
    min_p: mx.array | None
    top_k: mx.array
    top_p: mx.array | None


def make_filters(
    temperature: np.ndarray,
    min_p: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    vocab_size: int,
) -> list[Filters]:
    """Group the rows that filter.  Inputs are (T,), as in `Filters`, but top_k is k; 0 is off.

    Top-p without a small top-k may need a full sort; grouping limits that cost to such rows.
    """
    has_min_p, has_top_p = min_p > -np.inf, top_p >= 0
    small = (top_k > 0) & is_small(top_k, vocab_size)
    large = ~small & ((top_k > 0) | has_top_p)
    if small.any():  # greedy rows join as top-1: gathering the others would cost more
        small |= temperature == 0
        top_k = np.where(temperature == 0, 1, top_k)
    top_k = np.where(top_k > 0, top_k, vocab_size)
    filters = []
    for mine, k in (
        (has_min_p & ~small & ~large, 0),
        (small, int(top_k[small].max(initial=0))),
        (large, vocab_size),
    ):
        if mine.any():
            part = Filters(
                rows=row_numbers(np.flatnonzero(mine), len(mine)),
                k=k,
                temperature=column(temperature[mine]),
                min_p=column(min_p[mine]) if has_min_p[mine].any() else None,
                top_k=column(-top_k[mine]),
                top_p=column(top_p[mine]) if has_top_p[mine].any() else None,
            )
            filters.append(part)
    return filters


def thresholds(x: mx.array, filters: list[Filters]) -> mx.array:
    """The lowest logit (T, 1) that may be drawn; -inf for a row without a filter.

    A row with a NaN or an infinite best logit may get NaN, which filters nothing.
    """
    if filters[0].rows is None:
        return _threshold(x, filters[0])
    floor = mx.full((len(x), 1), -mx.inf)
    for part in filters:
        floor[part.rows] = _threshold(x[part.rows], part)
    return floor


def _threshold(x: mx.array, f: Filters) -> mx.array:
    """Apply min-p, then top-k, then top-p to the remaining mass.  The best token always stays."""
    if not f.k:
        assert f.min_p is not None, "a filter that sorts nothing filters by min-p alone"
        return x.max(-1, keepdims=True) + f.min_p
    s = mx.sort(candidates(x, f.k)[0], -1)
    size, best = s.shape[1], s[:, -1:]
    floor = mx.take_along_axis(s, f.top_k, -1)  # s ascends, so -k counts from the end
    if f.min_p is not None:
        floor = mx.maximum(floor, best + f.min_p)
    if f.top_p is not None:
        # Sum from the least likely token up: a sum near 1 would absorb small terms.
        order = mx.arange(-size, 0)[None]
        mass = _weights(s, best, order, f.top_k, floor, f.temperature).cumsum(-1)
        cut = (mass <= f.top_p * mass[:, -1:]).sum(-1, keepdims=True)
        floor = mx.maximum(floor, mx.take_along_axis(s, mx.minimum(cut, size - 1), -1))
    return floor


@fused
def _weights(
    s: mx.array,
    best: mx.array,
    order: mx.array,
    top_k: mx.array,
    floor: mx.array,
    temperature: mx.array,
) -> mx.array:
    # Cut by order, not by value: other rows decide how many of the tokens that tie with the k-th
    # are among the candidates.
    out = (order < top_k) | (s < floor)
    return mx.where(out, 0.0, mx.exp((s - best) / temperature))


def random_bits(keys: mx.array, vocab_size: int) -> mx.array:
    """(T, V) uint32 random bits; each row depends on its own key (T, 2) uint32 only.

    `mx.random.split` yields raw bits in one primitive; `uniform` takes 20.
    """
    pairs = -(-vocab_size // 2)
    bits = mx.vmap(lambda key: mx.random.split(key, pairs))(keys).reshape(len(keys), 2 * pairs)
    return bits if vocab_size % 2 == 0 else bits[:, :vocab_size]


def _perturb(x: mx.array, bits: mx.array, temperature: mx.array) -> mx.array:
    # Gumbel noise -log(-log(1 - u)): large near u = 0, where u is most precise.  The constants keep
    # u in [2^-33, 1 - 2^-24] for any bits, so the noise is in [-2.9, 22.9].
    minus_u = bits.astype(mx.float32) * (-(1 - 2**-24) * 2**-32) - 2**-33
    return x - temperature * mx.log(-mx.log1p(minus_u))


@fused
def perturb(x: mx.array, bits: mx.array, temperature: mx.array) -> mx.array:
    """Add noise to logits, (T, V) float32; the argmax then draws from softmax(x / temperature).

    temperature (T, 1) scales the noise, not the logits, so 0 is greedy without a branch.
    """
    return _perturb(x, bits, temperature)


@fused
def perturb_above(x: mx.array, floor: mx.array, bits: mx.array, temperature: mx.array) -> mx.array:
    """`perturb` without the tokens below `floor` (T, 1)."""
    return _perturb(mx.where(x < floor, -mx.inf, x), bits, temperature)
