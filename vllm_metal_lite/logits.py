"""What sampling does to logits, as functions of arrays.

Every function treats its rows independently.  `x` is (T, V) float32, a per-row value is (T, 1).
Top-k, top-p and min-p become one threshold a row, so no sorted row is ever put back in order: a
token stays iff its logit is not below the threshold.  Tokens that tie with the last one kept are
kept too (as in vLLM for top-k; there top-p cuts ties in an order of its own).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx

# Candidates for the k largest logits are looked for in blocks of this many tokens.
_BLOCK = 64


def _fused(fn: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """One kernel instead of one an operation; on a CPU, MLX would call a C++ compiler for it."""
    compiled = cache(lambda: mx.compile(fn, shapeless=True))
    return lambda *args: (fn if backend.is_cpu() else compiled())(*args)


@_fused
def penalize_repetition(x: mx.array, seen: mx.array, penalty: mx.array) -> mx.array:
    """Tokens seen (in the prompt or since) become less likely if the penalty is above 1.

    seen: (T, V) uint32, see `Sampler`; penalty: (T, 1), 1 for rows that ask for none.
    """
    return mx.where(seen > 0, mx.where(x > 0, x / penalty, x * penalty), x)


@_fused
def penalize_frequency(
    x: mx.array, seen: mx.array, frequency: mx.array, presence: mx.array
) -> mx.array:
    """Generated tokens become less likely, by how often they came and by whether they came.

    seen: (T, V) uint32, see `Sampler`; frequency, presence: (T, 1), 0 for rows that ask for none.
    """
    return x - frequency * (seen >> 1) - presence * (seen > 1)


def candidates(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """A few tokens of each row, in order of id, that include its k most likely ones.

    Returns logits (T, C) and token ids (T or 1, C).  The k blocks with the largest maxima hold the
    k largest logits (ties: the lowest ids), so a row is read once and only C = k * 64 values are
    sorted; on Metal a partition of the whole row would be a sort of it.  If that is no less than
    half the row, C = V.
    """
    num_rows, vocab_size = x.shape
    num_blocks = -(-vocab_size // _BLOCK)
    if 2 * k >= num_blocks:
        return x, mx.arange(vocab_size)[None]
    if vocab_size % _BLOCK:
        x = mx.pad(x, ((0, 0), (0, -vocab_size % _BLOCK)), constant_values=-mx.inf)
    x = x.reshape(num_rows, num_blocks, _BLOCK)
    blocks = mx.sort(mx.argsort(-x.max(-1), -1)[:, :k], -1)[:, :, None]
    ids = (blocks * _BLOCK + mx.arange(_BLOCK)).reshape(num_rows, -1)
    return mx.take_along_axis(x, blocks, 1).reshape(num_rows, -1), ids


@dataclass(frozen=True)
class Filters:
    """Which tokens may be drawn; all arrays (T, 1), each with a value that means "all of them".

    window: how many of a row's largest logits have to be sorted, 0 if none.
    min_p: float32 temperature * log(min_p), -inf: all; None if no row has one.
    top_k: int32 -k; -V: all.  top_k_off: float32, 0 or, where top_k keeps all, -inf.
    top_p: float32 1 - top_p, or None.  top_p_off: float32, as top_k_off.
    """

    window: int
    min_p: mx.array | None
    top_k: mx.array
    top_k_off: mx.array
    top_p: mx.array | None
    top_p_off: mx.array


@_fused
def _weights(
    s: mx.array, rank: mx.array, top_k: mx.array, floor: mx.array, temperature: mx.array
) -> mx.array:
    # By rank, not by value: how many of the tokens that tie with the k-th are at hand depends on
    # the window, hence on the batch.
    out = (rank < top_k) | (s < floor)
    return mx.where(out, 0.0, mx.exp((s - s[:, -1:]) / temperature))


def thresholds(x: mx.array, filters: Filters, temperature: mx.array) -> mx.array:
    """The lowest logit (T, 1) that may be drawn: min-p, then top-k, then top-p of what is left.

    temperature: (T, 1), 0 in rows without a top-p.  The best token always stays.  A row with a NaN
    or an infinite best logit may get NaN, which cuts nothing.
    """
    if not filters.window:
        return x.max(-1, keepdims=True) + filters.min_p
    s = mx.sort(candidates(x, filters.window)[0], -1)
    size = s.shape[1]
    # Of the candidates in rising order, top_k = -k counts from the end.
    floor = mx.take_along_axis(s, mx.maximum(filters.top_k, -size), -1) + filters.top_k_off
    if filters.min_p is not None:
        floor = mx.maximum(floor, s[:, -1:] + filters.min_p)
    if filters.top_p is not None:
        # Summed from the least likely up, as small terms would be lost against a sum near 1.
        rank = mx.arange(-size, 0)[None]
        mass = _weights(s, rank, filters.top_k, floor, temperature).cumsum(-1)
        cut = (mass <= filters.top_p * mass[:, -1:]).sum(-1, keepdims=True)
        last_kept = mx.take_along_axis(s, mx.minimum(cut, size - 1), -1)
        floor = mx.maximum(floor, last_kept + filters.top_p_off)
    return floor


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


@_fused
def perturb(x: mx.array, bits: mx.array, temperature: mx.array) -> mx.array:
    """Logits with noise: their argmax is a draw from softmax(x / temperature), (T, V) float32.

    temperature (T, 1) scales the noise rather than the logits, so 0 is greedy without a branch.
    """
    return _perturb(x, bits, temperature)


@_fused
def perturb_above(x: mx.array, floor: mx.array, bits: mx.array, temperature: mx.array) -> mx.array:
    """`perturb`, with the tokens below `floor` (T, 1) left out."""
    return _perturb(mx.where(x < floor, -mx.inf, x), bits, temperature)


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
    return LogprobArrays(
        token_ids,
        values - mx.logsumexp(x, -1, keepdims=True),
        1 + (x > chosen).sum(-1),
    )
