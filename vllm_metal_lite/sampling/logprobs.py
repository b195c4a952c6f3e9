"""Log-probabilities of tokens."""

from typing import Generic, NamedTuple, TypeVar

from vllm_metal_lite.backend import mx
from vllm_metal_lite.sampling.logits import candidates, in_blocks

_PART = 256  # prompt rows scored at once

A = TypeVar("A")


class Logprobs(NamedTuple, Generic[A]):
    """Log-probabilities: arrays of the device (mx.array) or of the host.

    token_ids: (T, 1+k) int32, the chosen (or target) token, then the k most likely in order (ties:
    lowest id first), or the tokens that the row names.  logprobs: (T, 1+k) float32.  ranks: (T,)
    int32, the chosen token's rank: 1 + the number of more likely tokens.
    """

    token_ids: A
    logprobs: A
    ranks: A


def gather_logprobs(
    logits: mx.array, targets: mx.array, k: int, named: mx.array | None = None
) -> Logprobs[mx.array]:
    """Score targets (T,) int and the k most likely tokens under logits (T, V) of any float type.

    named: (T, k) int32, token ids to score; -1 keeps the most likely token of that column.
    """
    x = logits.astype(mx.float32)
    token_ids = targets.astype(mx.int32)[:, None]
    chosen = mx.take_along_axis(x, token_ids, -1)
    if k:
        top, ids = candidates(x, k)
        order = mx.argsort(-top, -1)[:, :k]
        others = mx.take_along_axis(ids.astype(mx.int32), order, -1)
        if named is not None:
            others = mx.where(named < 0, others, named)
        token_ids = mx.concatenate([token_ids, others], -1)
    values = mx.take_along_axis(x, token_ids, -1)
    # Two levels: MLX sums a row sequentially on a CPU, an error of 2e-4 at V = 152,000.
    total = mx.logsumexp(mx.logsumexp(in_blocks(x), -1), -1, keepdims=True)
    return Logprobs(token_ids, values - total, 1 + (x > chosen).sum(-1))


def prompt_logprobs(logits: mx.array, targets: mx.array, k: int) -> Logprobs[mx.array]:
    """Score each target (P,) int and the k most likely tokens under logits (P, V), any float type.

    Lazy.  Works in parts, so that one part's float32 values are freed before the next part.
    """
    parts = [
        gather_logprobs(logits[at : at + _PART], targets[at : at + _PART], k)
        for at in range(0, len(targets), _PART)
    ]
    if len(parts) == 1:
        return parts[0]
    return Logprobs(*(mx.concatenate(list(column)) for column in zip(*parts, strict=True)))
