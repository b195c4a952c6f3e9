"""Batched sampling on the device: a step's logits in, one token per row out.

The order is that of vLLM's sampler: a grammar's mask; log-probabilities from these logits;
allowed tokens, bad words, logit_bias and min_tokens; repetition, frequency and presence penalties;
temperature; min_p; top_k; top_p; the draw.  A draw is the argmax of logits plus Gumbel noise.  The
noise depends only on the request's seed and its number of generated tokens.  Batch, row, preemption
and chunking do not change the token drawn from the same logits.

A row with only -inf or NaN yields no token (`no_token`).  A row with some NaN yields no token, or a
token that is not -inf.  Among several +inf the lowest id wins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.errors import Option, SamplingError, show
from vllm_metal_lite.sampling import logits as ops
from vllm_metal_lite.sampling import no_token
from vllm_metal_lite.sampling.bad_words import BadWords
from vllm_metal_lite.sampling.filters import Filters, RowFilters, thresholds
from vllm_metal_lite.sampling.logprobs import Logprobs, gather_logprobs
from vllm_metal_lite.sampling.masks import TokenMasks
from vllm_metal_lite.sampling.penalties import Penalties
from vllm_metal_lite.sampling.processors import (
    AllowedTokens,
    Drafts,
    LogitBias,
    MinTokens,
    Operation,
    SeatedRequest,
    put_on_device,
)
from vllm_metal_lite.sampling_params import SamplingParams


@dataclass
class SamplerOutput:
    """Lazy arrays.  token_ids: (T,) int32.  logprobs: None unless a row asked for them.

    for_host: a copy of token_ids with the marks of `no_token.mark`.
    """

    token_ids: mx.array
    logprobs: Logprobs[mx.array] | None
    for_host: mx.array


# num_generated, seen and recent: see `Penalties` and `BadWords`.
_State = tuple[np.ndarray, mx.array, mx.array]


@dataclass(frozen=True)
class _SamplingMetadata:
    """The inputs of a step for a set of rows, on the device; None: no row needs them."""

    key: tuple[int, bytes]
    num_logprobs: int  # -1: none
    named: mx.array | None  # see gather_logprobs
    operations: list[Operation]
    temperature: mx.array | None  # None: all greedy
    filters: list[RowFilters]


class Sampler:
    """Samples for up to max_num_seqs requests, each identified by its req_index.

    The host keeps each request's options.  A step's options go to the device only when its rows
    change.

    ranks: every rank samples but takes rank 0's tokens, because different chips round differently.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, ranks: RankGroup = ALONE) -> None:
        self.vocab_size, self._ranks = vocab_size, ranks
        self._seeds = np.zeros(max_num_seqs, np.uint64)  # after `_mix`
        self._num_generated = np.zeros(max_num_seqs, np.int32)
        self._num_logprobs = np.full(max_num_seqs, -1)  # -1: not requested
        self._seats: set[int] = set()
        self._named: dict[int, Sequence[int]] = {}  # req_index -> tokens to score
        self._bad_words = BadWords(vocab_size, max_num_seqs)
        self._penalties = Penalties(vocab_size, max_num_seqs)
        self._processors = (  # in the order of their application
            AllowedTokens(vocab_size),
            self._bad_words,
            LogitBias(vocab_size),
            MinTokens(vocab_size, self._num_generated),
            self._penalties,
        )
        self._filters = Filters(vocab_size, max_num_seqs)
        self._version = 0  # counts changes of the options
        self._metadata: _SamplingMetadata | None = None

    def add(
        self,
        req_index: int,
        params: SamplingParams,
        seed: int,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        eos_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]] = (),
        logprob_token_ids: Sequence[int] = (),
    ) -> None:
        """Set up the seat of a request, new or resumed after preemption.

        token_ids: (n,) int, all tokens known so far.  params should have passed `validate`; ids
        outside the vocabulary have no effect.  seed: any integer; only the low 64 bits count.
        bad_words: the token ids of params.bad_words, see `bad_word_ids`.  logprob_token_ids: tokens
        to score instead of the most likely, all in the vocabulary.
        """
        self.remove(req_index)
        self._version += 1
        self._seats.add(req_index)
        stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}
        token_ids = np.asarray(token_ids)
        request = SeatedRequest(params, token_ids, num_prompt_tokens, stop_ids, bad_words)
        self._seeds[req_index] = _mix(np.array([seed & (2**64 - 1)], np.uint64) + _INCREMENT)[0]
        self._num_generated[req_index] = request.num_generated
        if logprob_token_ids:
            self._num_logprobs[req_index] = len(logprob_token_ids)
            self._named[req_index] = logprob_token_ids
        elif params.logprobs is not None:
            self._num_logprobs[req_index] = params.logprobs
        for processor in self._processors:
            processor.add(req_index, request)
        self._filters.add(req_index, params)

    def remove(self, req_index: int) -> None:
        """Free the seat; no effect if the seat is free."""
        if req_index not in self._seats:
            return
        self._version += 1
        self._seats.remove(req_index)
        self._num_logprobs[req_index] = -1
        self._named.pop(req_index, None)
        for option in (*self._processors, self._filters):
            option.remove(req_index)

    @property
    def state(self) -> _State:
        """What a call changes, to be set if the step fails.  Valid until `add` or `remove`."""
        return self._num_generated.copy(), self._penalties.seen, self._bad_words.recent

    @state.setter
    def state(self, state: _State) -> None:
        # Copied into the array, which `MinTokens` has too.
        self._num_generated[:], self._penalties.seen, self._bad_words.recent = state
        self._metadata = None

    def __call__(
        self,
        logits: mx.array,
        req_indices: np.ndarray,
        grammar: TokenMasks | None = None,
        drafts: Drafts | None = None,
    ) -> SamplerOutput:
        """Choose the next token of each row; lazy: nothing is evaluated.

        logits: (T, V) float32, float16 or bfloat16.  req_indices: (T,) int, the request of each
        row, all distinct except for drafts.  Counts one more generated token for each.  If any
        request wants logprobs, all rows get the largest number requested.  grammar: the tokens a
        grammar allows some rows in this step, applied before logprobs.
        drafts: a row after drafts is sampled as if these were the request's tokens.  Then nothing
        is counted: `accept` follows.
        """
        metadata = self._metadata_for(req_indices, drafts)
        if grammar is not None:
            logits = put_on_device(grammar, len(req_indices))(logits)
        x = logits
        for operation in metadata.operations:
            x = operation.apply(x, grammar)
        if metadata.temperature is not None:
            bits = ops.random_bits(self._keys(req_indices, drafts), self.vocab_size)
            x = x.astype(mx.float32)
            if metadata.filters:
                floor = thresholds(x, metadata.filters)
                x = ops.perturb_above(x, floor, bits, metadata.temperature)
            else:
                x = ops.perturb(x, bits, metadata.temperature)
        token_ids = self._ranks.from_rank_0(mx.argmax(x, -1).view(mx.int32))
        for_host = no_token.mark(x, token_ids)
        if drafts is None:
            self._num_generated[req_indices] += 1
            stays = [operation.count(token_ids) for operation in metadata.operations]
            if not all(stays):
                self._metadata = None
        logprobs = None
        if metadata.num_logprobs >= 0:
            logprobs = gather_logprobs(logits, token_ids, metadata.num_logprobs, metadata.named)
        return SamplerOutput(token_ids, logprobs, for_host)

    def reads_drafts(self, req_indices: np.ndarray) -> bool:
        """Whether a row's options depend on the drafts before the row, not only on their number."""
        seats = {*self._bad_words.seats, *self._penalties.seats}
        return not seats.isdisjoint(req_indices.tolist())

    def accept(self, req_index: int, token_ids: Sequence[int]) -> None:
        """Count a request's tokens of a step with drafts."""
        self._num_generated[req_index] += len(token_ids)
        for processor in self._processors:
            processor.accept(req_index, token_ids)

    def _metadata_for(self, req_indices: np.ndarray, drafts: Drafts | None) -> _SamplingMetadata:
        """The metadata of these rows; an unchanged decode batch reuses its metadata."""
        key = (self._version, req_indices.tobytes())
        if drafts is None and self._metadata is not None and self._metadata.key == key:
            return self._metadata
        num_logprobs = int(self._num_logprobs[req_indices].max())
        operations = [processor.of_rows((req_indices, drafts)) for processor in self._processors]
        temperature, filters = self._filters.of_rows(req_indices)
        metadata = _SamplingMetadata(
            key=key,
            num_logprobs=num_logprobs,
            named=self._select_named(req_indices, num_logprobs),
            operations=[operation for operation in operations if operation is not None],
            temperature=temperature,
            filters=filters,
        )
        self._metadata = metadata if drafts is None else None
        return metadata

    def _select_named(self, req_indices: np.ndarray, k: int) -> mx.array | None:
        rows = [self._named.get(r, ()) for r in req_indices.tolist()]
        if not any(rows):
            return None
        return mx.array([[*row, *[-1] * (k - len(row))] for row in rows], mx.int32)

    def _keys(self, req_indices: np.ndarray, drafts: Drafts | None) -> mx.array:
        """(T, 2) uint32, the key of each row's noise."""
        count = self._num_generated[req_indices].astype(np.uint64)
        if drafts is None or drafts.rejected is None:
            depth = 0 if drafts is None else drafts.depth.astype(np.uint64)
            return mx.array(_noise_keys(self._seeds[req_indices], count + np.uint64(depth)))
        # The keys for each possible number of rejected drafts; the device takes the right ones.
        fewer = np.arange(int(drafts.depth.max()) + 1)
        counts = count[:, None] + np.maximum(drafts.depth[:, None] - fewer, 0).astype(np.uint64)
        keys = mx.array(_noise_keys(self._seeds[req_indices, None], counts))
        return mx.take_along_axis(keys, drafts.rejected[:, None, None], axis=1).squeeze(1)


def _noise_keys(seeds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(..., 2) uint32, the keys of requests with these numbers of generated tokens."""
    keys = _mix(seeds + counts * _INCREMENT)
    return keys.view(np.uint32).reshape(*counts.shape, 2)


def _mix(z: np.ndarray) -> np.ndarray:
    """The output function of splitmix64: uint64 to well-mixed uint64, one to one."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # the increment of splitmix64


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raise SamplingError if a token id or a number of logprobs exceeds the vocabulary."""
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(params, name) or 0) > vocab_size:
            raise SamplingError(
                Option(name),
                f" must be at most the vocabulary's size, {vocab_size}, got {show(count)}",
            )
    given = {
        name: getattr(params, name)
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids")
    }
    if (thinking := params.thinking) is not None:
        given["thinking"] = [*thinking.start, *thinking.end]
    for name, token_ids in given.items():
        for token_id in token_ids or ():
            if token_id >= vocab_size:
                raise SamplingError(
                    Option(name),
                    f" must hold token ids below the vocabulary's size, {vocab_size}, "
                    f"got {show(token_id)}",
                )
