"""Options that change logits before the temperature, one class each, like vLLM's logits processors.

Temperature, min_p, top_k and top_p belong to the draw (`filters.py`).

A processor keeps the option's value for each seat.  `of_rows` puts the values of a step's rows on
the device.  An unchanged decode batch reuses the result.

A new processor needs a class, and a place in the order of `Sampler`.

Drafts tell a processor which drafts come before a row: a request with k drafts has 1 + k rows that
follow one another, and row i is sampled as if the first i drafts were the request's tokens.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import NO_DRAFT
from vllm_metal_lite.sampling.logits import row_numbers
from vllm_metal_lite.sampling.masks import TokenMasks, pack_mask
from vllm_metal_lite.sampling_params import SamplingParams


@dataclass(frozen=True)
class Drafts:
    """The drafts before each of T rows, which the sampler does not count yet.

    depth: (T,) int32, their number.  token_ids: (T, K) int32, padded at the end by NO_DRAFT; K may
    be 0 if no row's options read drafts (`Sampler.reads_drafts`).
    rejected: (T,) int32, how many of them do not count; None: all count.  Only the device knows
    this, and chooses the noise by it.  All other options take `depth`.
    """

    depth: np.ndarray
    token_ids: np.ndarray
    rejected: mx.array | None = None

    @classmethod
    def of(cls, token_ids: np.ndarray) -> "Drafts":
        """token_ids: see ForwardBatch.draft_token_ids."""
        rows = np.arange(len(token_ids))
        starts = np.append(True, token_ids[:-1] == NO_DRAFT)
        first = np.maximum.accumulate(rows * starts)
        depth = (rows - first).astype(np.int32)
        width = np.arange(max(int(depth.max()), 1))
        at = np.minimum(first[:, None] + width, len(token_ids) - 1)
        tokens = np.where(width < depth[:, None], token_ids[at], NO_DRAFT)
        return cls(depth, tokens.astype(np.int32))

    def before(self, rows: np.ndarray) -> tuple[mx.array, mx.array]:
        """(index into `rows`, token) of each draft before each of these rows."""
        tokens = self.token_ids[rows]
        index, at = np.nonzero(tokens != NO_DRAFT)
        return mx.array(index.astype(np.int32)), mx.array(tokens[index, at])


LARGE = 1e18  # bounds options that have no limit, so that float32 holds their products

T = TypeVar("T")
Members: TypeAlias = list[tuple[int, T]]  # (row, its request's value) of rows with an option
# Rows of a step's logits: (their req_indices, (T,) int; the drafts before them, if there are any).
Rows: TypeAlias = tuple[np.ndarray, Drafts | None]


@dataclass(frozen=True)
class Operation:
    """One option of a step's rows, on the device.

    apply: (logits (T, V), the masks already applied for grammars, or None) -> logits.
    count: records the drawn tokens, (T,) int32, lazily.  False: the next step must gather anew.
    """

    apply: Callable[[mx.array, TokenMasks | None], mx.array]
    count: Callable[[mx.array], bool] = lambda token_ids: True


@dataclass(frozen=True)
class SeatedRequest:
    """A request that takes a seat, new or resumed after preemption.

    token_ids: (n,) int, all tokens known so far.  stop_token_ids: tokens that end the answer.
    bad_words: the token ids of params.bad_words.  Ids outside the vocabulary have no effect.
    """

    params: SamplingParams
    token_ids: np.ndarray
    num_prompt_tokens: int
    stop_token_ids: Set[int]
    bad_words: Sequence[Sequence[int]]

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class LogitsProcessor(Generic[T]):
    """One option.  T: its value for a request."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.seats: dict[int, T] = {}  # by req_index

    def add(self, req_index: int, request: SeatedRequest) -> None:
        """Keep the option's value for this request, if the request has the option."""
        raise NotImplementedError

    def accept(self, req_index: int, token_ids: Sequence[int]) -> None:
        """Record a request's tokens of a step with drafts."""

    def remove(self, req_index: int) -> None:
        self.seats.pop(req_index, None)

    def of_rows(self, rows: Rows) -> Operation | None:
        """The option's operation for these rows; None if no row has the option."""
        seats = self.seats
        members = [(row, seats[r]) for row, r in enumerate(rows[0].tolist()) if r in seats]
        return self.gather(members, rows) if members else None

    def gather(self, members: Members[T], rows: Rows) -> Operation | None:
        raise NotImplementedError


def put_on_device(masks: TokenMasks, num_rows: int) -> Callable[[mx.array], mx.array]:
    """Masks for logits (T, V) of num_rows rows, to be applied in one step or in many.

    The result has -inf for tokens that are not allowed, or beyond the mask's end.
    """
    order = np.argsort(masks.rows)
    rows = row_numbers(masks.rows[order], num_rows)
    words = mx.array(np.ascontiguousarray(masks.bits[order]).view(np.uint32))

    def apply(x: mx.array) -> mx.array:
        bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
        may = bits.reshape(len(bits), -1)[:, : x.shape[1]]
        if may.shape[1] < x.shape[1]:
            may = mx.pad(may, [(0, 0), (0, x.shape[1] - may.shape[1])])
        y = x if rows is None else x[rows]
        y = mx.where(may == 1, y, mx.array(-mx.inf, x.dtype))
        return y if rows is None else mx.put_along_axis(x, rows[:, None], y, axis=0)

    return apply


class AllowedTokens(LogitsProcessor[np.ndarray]):
    """Excludes all tokens but those listed.  A seat keeps bits, see TokenMasks."""

    def add(self, req_index: int, request: SeatedRequest) -> None:
        if (token_ids := request.params.allowed_token_ids) is not None:
            self.seats[req_index] = pack_mask(token_ids, self.vocab_size)

    def gather(self, members: Members[np.ndarray], rows: Rows) -> Operation:
        which, bits = zip(*members, strict=True)
        apply = put_on_device(TokenMasks(np.array(which), np.stack(bits)), len(rows[0]))
        return Operation(lambda x, grammar: apply(x))


class LogitBias(LogitsProcessor[tuple[np.ndarray, np.ndarray]]):
    """Adds to the logits of some tokens.  A seat keeps (token ids, addends)."""

    def add(self, req_index: int, request: SeatedRequest) -> None:
        bias = request.params.logit_bias or {}
        known = {t: b for t, b in bias.items() if 0 <= t < self.vocab_size}
        if known:
            addends = np.clip(np.array(list(known.values()), np.float64), -LARGE, LARGE)
            tokens = np.array(list(known), np.int32)
            self.seats[req_index] = tokens, addends.astype(np.float32)

    def gather(self, members: Members[tuple[np.ndarray, np.ndarray]], rows: Rows) -> Operation:
        at = _index((row, token_ids) for row, (token_ids, _) in members)
        addends = mx.array(np.concatenate([each for _, (_, each) in members]))
        return Operation(lambda x, grammar: x.astype(mx.float32).at[at].add(addends))


class MinTokens(LogitsProcessor[tuple[np.ndarray, int]]):
    """Excludes stop tokens before min_tokens.  A seat keeps (stop tokens, min_tokens).

    num_generated: (max_num_seqs,) int, the sampler's own count.
    """

    def __init__(self, vocab_size: int, num_generated: np.ndarray) -> None:
        super().__init__(vocab_size)
        self._num_generated = num_generated

    def add(self, req_index: int, request: SeatedRequest) -> None:
        known = [t for t in request.stop_token_ids if 0 <= t < self.vocab_size]
        if known and (min_tokens := request.params.min_tokens) > request.num_generated:
            self.seats[req_index] = np.array(known, np.int32), min_tokens

    def gather(self, members: Members[tuple[np.ndarray, int]], rows: Rows) -> Operation | None:
        req_indices, drafts = rows
        known = self._num_generated[req_indices]
        if drafts is not None:
            known = known + drafts.depth
        left = {row: min_tokens - int(known[row]) for row, (_, min_tokens) in members}
        below = [(row, stop_token_ids) for row, (stop_token_ids, _) in members if left[row] > 0]
        if not below:
            return None
        at, calls_left = _index(below), min(left[row] for row, _ in below)

        def count(token_ids: mx.array) -> bool:
            nonlocal calls_left
            calls_left -= 1
            return calls_left > 0

        return Operation(lambda x, grammar: _exclude_ends(x, at, grammar), count)


def _exclude_ends(
    x: mx.array, at: tuple[mx.array, mx.array], grammar: TokenMasks | None
) -> mx.array:
    """Exclude stop tokens.  A row may still end if its grammar allows nothing else, as in vLLM."""
    x = x.astype(mx.float32)
    held = x.at[at].minimum(-mx.inf)
    if grammar is None:
        return held
    has_grammar = np.zeros((len(x), 1), bool)
    has_grammar[grammar.rows] = True
    is_over = mx.array(has_grammar) & (held.max(-1, keepdims=True) == -mx.inf)
    return mx.where(is_over, x, held)


def _index(members: Iterable[tuple[int, np.ndarray]]) -> tuple[mx.array, mx.array]:
    """Members (row, its tokens) as two arrays: rows and tokens, (N,) int32 each."""
    rows, tokens = zip(*members, strict=True)
    repeated = np.repeat(np.array(rows, np.int32), [len(each) for each in tokens])
    return mx.array(repeated), mx.array(np.concatenate(tokens))
