"""Operations on logits that several parts of the sampler need, as functions of arrays.

Every function treats rows independently.  `x` is (T, V) float32; a per-row value is (T, 1).
"""

from collections.abc import Callable
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
