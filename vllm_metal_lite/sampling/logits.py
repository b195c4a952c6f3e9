"""What sampling does to logits, as functions of arrays.

Every function treats its rows independently.  `x` is (T, V) float32, a per-row value is (T, 1).
Top-k, top-p and min-p become one threshold a row, so no sorted row is ever put back in order: a
token stays iff its logit is not below the threshold.  Tokens that tie with the last one kept are
kept too (as in vLLM for top-k; there top-p cuts ties in an order of its own).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from math import isqrt

import numpy as np

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile

# Candidates for the k largest logits are looked for in blocks of this many tokens.
_BLOCK = 64

# Fewest parts of a row that are worth five launches.
_MIN_PARTS = 16


def column(values: np.ndarray) -> mx.array:
    """(T,) on the host as (T, 1) on the device."""
    return mx.array(values[:, None])


def row_numbers(rows: np.ndarray, num_rows: int) -> mx.array | None:
    """Rising row numbers for the device; None if they are all there are."""
    return mx.array(rows.astype(np.int32)) if len(rows) < num_rows else None


def fused(fn: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """One kernel instead of one an operation; on a CPU, MLX would call a C++ compiler for it."""
    compiled = cache(lambda: mx.compile(fn, shapeless=True))

    @wraps(fn)
    def call(*args: mx.array) -> mx.array:
        return fn(*args) if backend.is_cpu() else compiled()(*args)

    return call


@fused
def penalize_repetition(x: mx.array, seen: mx.array, penalty: mx.array) -> mx.array:
    """Tokens seen (in the prompt or since) become less likely if the penalty is above 1.

    seen: (T, V) uint32, see `Sampler`; penalty: (T, 1), 1 for a row that asks for none.
    """
    return mx.where(seen > 0, mx.where(x > 0, x / penalty, x * penalty), x)


@fused
def penalize_frequency(
    x: mx.array, seen: mx.array, frequency: mx.array, presence: mx.array
) -> mx.array:
    """Generated tokens become less likely, by how often they came and by whether they came.

    seen: (T, V) uint32, see `Sampler`; frequency, presence: (T, 1), 0 for a row that asks for none.
    """
    return x - frequency * (seen >> 1) - presence * (seen > 1)


def _blocks(x: mx.array) -> mx.array:
    """(T, V) as (T, blocks, _BLOCK), the last one filled up with -inf."""
    if x.shape[1] % _BLOCK:
        x = mx.pad(x, [(0, 0), (0, -x.shape[1] % _BLOCK)], constant_values=-mx.inf)
    return x.reshape(len(x), -1, _BLOCK)


def is_small(k: int | np.ndarray, vocab_size: int) -> bool | np.ndarray:
    """Whether the k largest logits of a row can be found by sorting less than half of it."""
    return 2 * k * _BLOCK < vocab_size


def candidates(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """A few tokens of each row, in order of id, that include its k most likely ones.

    Returns logits (T, C) and token ids (T or 1, C).  The k blocks with the largest maxima hold the
    k largest logits (ties: the lowest ids), so a row is read once and C = k * 64 values are left to
    sort; on Metal a partition of the whole row would be a sort of it.  C = V unless k `is_small`.
    """
    vocab_size = x.shape[1]
    if not is_small(k, vocab_size):
        return x, mx.arange(vocab_size)[None]
    x = _blocks(x)
    blocks = mx.sort(mx.argsort(-x.max(-1), -1)[:, :k], -1)[:, :, None]
    ids = blocks * _BLOCK + mx.arange(_BLOCK)
    return mx.take_along_axis(x, blocks, 1).flatten(1), ids.flatten(1)


@dataclass(frozen=True)
class Filters:
    """Which tokens may be drawn, for R rows whose thresholds take the same amount of sorting.

    rows: (R,) int32, None: every row.  k: how many of a row's largest logits have to be sorted, 0
    if none.  The rest are (R, 1), or None if no row has one, with a value that keeps all tokens:
    temperature; min_p: temperature * log(min_p), -inf; top_k: int32 -k, -V; top_p: 1 - top_p, -1.
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
    """Group the rows that filter; all (T,), as in `Filters`, but top_k as k, 0: all.

    A top-p without a small top-k may need all of its row in order, and only that row pays for it.
    """
    has_min_p, has_top_p = min_p > -np.inf, top_p >= 0
    small = (top_k > 0) & is_small(top_k, vocab_size)
    large = ~small & ((top_k > 0) | has_top_p)
    if small.any():  # let greedy rows, as top-1, join: gathering the others would cost more
        small |= temperature == 0
        top_k = np.where(temperature == 0, 1, top_k)
    top_k = np.where(top_k > 0, top_k, vocab_size)
    groups = []
    for mine, k in (
        (has_min_p & ~small & ~large, 0),
        (small, int(top_k[small].max(initial=0))),
        (large, vocab_size),
    ):
        if mine.any():
            group = Filters(
                rows=row_numbers(np.flatnonzero(mine), len(mine)),
                k=k,
                temperature=column(temperature[mine]),
                min_p=column(min_p[mine]) if has_min_p[mine].any() else None,
                top_k=column(-top_k[mine]),
                top_p=column(top_p[mine]) if has_top_p[mine].any() else None,
            )
            groups.append(group)
    return groups


def thresholds(x: mx.array, groups: list[Filters]) -> mx.array:
    """The lowest logit (T, 1) that may be drawn; -inf for a row in none of the groups.

    A row with a NaN, or with an infinite best logit, may get NaN, which cuts nothing.
    """
    if groups[0].rows is None:
        return _threshold(x, groups[0])
    floor = mx.full((len(x), 1), -mx.inf)
    for group in groups:
        floor[group.rows] = _threshold(x[group.rows], group)
    return floor


def _threshold(x: mx.array, f: Filters) -> mx.array:
    """Min-p, then top-k, then top-p of the mass that is left.  The best token always stays."""
    if not f.k:
        assert f.min_p is not None, "a group that sorts nothing filters by min-p alone"
        return x.max(-1, keepdims=True) + f.min_p
    s = mx.sort(candidates(x, f.k)[0], -1)
    size, best = s.shape[1], s[:, -1:]
    floor = mx.take_along_axis(s, f.top_k, -1)  # -k counts from the end, s being in rising order
    if f.min_p is not None:
        floor = mx.maximum(floor, best + f.min_p)
    if f.top_p is not None:
        # Summed from the least likely up, as small terms would be lost against a sum near 1.
        rank = mx.arange(-size, 0)[None]
        mass = _weights(s, best, rank, f.top_k, floor, f.temperature).cumsum(-1)
        cut = (mass <= f.top_p * mass[:, -1:]).sum(-1, keepdims=True)
        floor = mx.maximum(floor, mx.take_along_axis(s, mx.minimum(cut, size - 1), -1))
    return floor


@fused
def _weights(
    s: mx.array,
    best: mx.array,
    rank: mx.array,
    top_k: mx.array,
    floor: mx.array,
    temperature: mx.array,
) -> mx.array:
    # By rank, not by value: how many of the tokens that tie with the k-th are at hand depends on
    # the other rows.
    out = (rank < top_k) | (s < floor)
    return mx.where(out, 0.0, mx.exp((s - best) / temperature))


def random_bits(keys: mx.array, vocab_size: int) -> mx.array:
    """(T, V) uint32 random bits; each row depends on its own key (T, 2) uint32 only.

    MLX hands out raw bits under the name of `split`: one primitive, where `uniform` is 20.
    """
    pairs = -(-vocab_size // 2)
    bits = mx.vmap(lambda key: mx.random.split(key, pairs))(keys).reshape(len(keys), 2 * pairs)
    return bits if vocab_size % 2 == 0 else bits[:, :vocab_size]


def _perturb(x: mx.array, bits: mx.array, temperature: mx.array) -> mx.array:
    # Gumbel noise -log(-log(1 - u)), with u's fine end where the noise is large.  The two constants
    # keep u in [2^-33, 1 - 2^-24] whatever the bits, so noise is finite: in [-2.9, 22.9].
    minus_u = bits.astype(mx.float32) * (-(1 - 2**-24) * 2**-32) - 2**-33
    return x - temperature * mx.log(-mx.log1p(minus_u))


@fused
def perturb(x: mx.array, bits: mx.array, temperature: mx.array) -> mx.array:
    """Logits with noise: their argmax is a draw from softmax(x / temperature), (T, V) float32.

    temperature (T, 1) scales the noise rather than the logits, so 0 is greedy without a branch.
    """
    return _perturb(x, bits, temperature)


@fused
def perturb_above(x: mx.array, floor: mx.array, bits: mx.array, temperature: mx.array) -> mx.array:
    """`perturb`, with the tokens below `floor` (T, 1) left out."""
    return _perturb(mx.where(x < floor, -mx.inf, x), bits, temperature)


def argmax(x: mx.array) -> mx.array:
    """mx.argmax(x, -1) of logits (T, V) of any float type -> (T,) uint32, in parts where it pays.

    MLX gives each row to one threadgroup, and most of a GPU waits for a few long ones: 90 us of an
    H200 for 16 rows of 151,936 in bfloat16, of a decode step of 2 ms.
    """
    parts = 1 if backend.is_cpu() else num_parts(*x.shape)
    return mx.argmax(x, -1) if parts == 1 else argmax_in_parts(x, parts)


@cache
def num_parts(rows: int, vocab_size: int) -> int:
    """In how many equal parts a GPU's `argmax` takes each row; 1: it does not.

    As near to the square root as V can be divided: both argmax are then about equally long.  A step
    of one row waits for the host, which four launches more would keep longer.
    """
    device = profile()
    if rows == 1 or rows >= device.argmax_fill or vocab_size < device.argmax_long:
        return 1
    parts = next(p for p in range(isqrt(vocab_size), 0, -1) if vocab_size % p == 0)
    return parts if parts >= _MIN_PARTS else 1


def argmax_in_parts(x: mx.array, parts: int) -> mx.array:
    """`argmax`, from the best token of each part; `parts` divides V.

    Five launches on a GPU.  Each argmax takes the first of those that tie, so the lowest id wins.
    NaN is passed over as by mx.argmax on a GPU, which begins with -inf; on a CPU, where it begins
    with the first value, so is all of a part that begins with NaN.
    """
    x = x.reshape(len(x), parts, -1)
    ids = mx.argmax(x, -1, keepdims=True)
    part = mx.argmax(mx.take_along_axis(x, ids, -1).squeeze(-1), -1, keepdims=True)
    best = mx.take_along_axis(ids.squeeze(-1), part, -1)
    return _token(part, best, x.shape[-1]).squeeze(-1)


@fused
def _token(part: mx.array, token: mx.array, size: int) -> mx.array:
    return part * size + token


@dataclass
class LogprobArrays:
    """Log-probabilities under the raw logits.

    token_ids: (T, 1+k) int32, the chosen (or target) token, then the k most likely in order (ties:
    lowest id first).  logprobs: (T, 1+k) float32.  ranks: (T,) int32, of the chosen token: 1 + the
    number of tokens that are more likely.
    """

    token_ids: mx.array
    logprobs: mx.array
    ranks: mx.array


def gather_logprobs(logits: mx.array, targets: mx.array, k: int) -> LogprobArrays:
    """Score targets (T,) int and the k most likely tokens under logits (T, V) of any float type."""
    x = logits.astype(mx.float32)
    token_ids = targets.astype(mx.int32)[:, None]
    chosen = values = mx.take_along_axis(x, token_ids, -1)
    if k:
        top, ids = candidates(x, k)
        order = mx.argsort(-top, -1)[:, :k]
        values = mx.concatenate([chosen, mx.take_along_axis(top, order, -1)], -1)
        top_ids = mx.take_along_axis(ids.astype(mx.int32), order, -1)
        token_ids = mx.concatenate([token_ids, top_ids], -1)
    # In two levels, as MLX's CPU sums a row from one end to the other: off by 2e-4 at V = 152,000.
    total = mx.logsumexp(mx.logsumexp(_blocks(x), -1), -1, keepdims=True)
    return LogprobArrays(
        token_ids,
        values - total,
        1 + (x > chosen).sum(-1),
    )
