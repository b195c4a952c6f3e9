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
from math import inf, log

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.errors import Option, SamplingError, show
from vllm_metal_lite.sampling import logits as ops
from vllm_metal_lite.sampling import no_token
from vllm_metal_lite.sampling.drafts import NO_DRAFTS, Drafts
from vllm_metal_lite.sampling.logits import Logprobs
from vllm_metal_lite.sampling.masks import (
    BadWords,
    BadWordsRows,
    DeviceMasks,
    TokenMasks,
    hold_back_ends,
    pack_mask,
)
from vllm_metal_lite.sampling_params import SamplingParams

# A request's row of the host table.  Unused options have neutral values, so that an operation
# another row needs leaves this row unchanged.
_ROW = np.dtype(
    [
        ("seed", np.uint64),  # after `_mix`
        ("num_generated", np.int32),
        ("num_logprobs", np.int32),  # -1: not requested
        ("temperature", np.float32),  # 0: greedy
        ("min_p", np.float32),  # temperature * log(min_p), -inf: off
        ("top_k", np.int32),  # 0: off
        ("top_p", np.float32),  # 1 - top_p, -1: off
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("counts_row", np.int32),  # row of the device's `seen`, -1: no penalties
    ]
)
_NEUTRAL = np.array((0, 0, -1, 0, -inf, 0, -1, 1, 0, 0, -1), _ROW)
_LARGE = 1e30  # bounds options that have no limit, so that float32 holds their products
_PART = 256  # prompt rows scored at once
_FOREVER = np.iinfo(np.int32).max


@dataclass
class SamplerOutput:
    """Lazy arrays.  token_ids: (T,) int32.  logprobs: None unless a row asked for them.

    for_host: a copy of token_ids with the marks of `no_token.mark`.
    """

    token_ids: mx.array
    logprobs: Logprobs[mx.array] | None
    for_host: mx.array


@dataclass(frozen=True)
class SamplerState:
    """What a call changes.  num_generated: (max_num_seqs,).  seen, recent: on the device."""

    num_generated: np.ndarray
    seen: mx.array
    recent: mx.array


@dataclass
class _Penalties:
    """Penalties of R rows; None omits an operation.

    counts_rows: (R,) rows of `seen`; all_counts_rows: whether these are all rows, in order.  rows:
    (R,) rows of the batch, None: all.  drafts: (index into R, token) of the drafts before each row;
    None: no drafts.  The others are (R, 1).
    """

    counts_rows: mx.array
    all_counts_rows: bool
    rows: mx.array | None
    repetition: mx.array | None
    frequency: mx.array | None
    presence: mx.array | None
    drafts: tuple[mx.array, mx.array] | None


@dataclass
class _SamplingMetadata:
    """The graph inputs of a set of rows; None omits an operation."""

    key: tuple[int, bytes]
    calls_left: int  # until a request reaches its min_tokens
    num_logprobs: int  # -1: none
    named: mx.array | None  # see gather_logprobs
    allowed: DeviceMasks | None
    bad_words: BadWordsRows | None
    bias: tuple[mx.array, mx.array, mx.array] | None  # rows, tokens, addends
    ends: tuple[mx.array, mx.array] | None  # rows, tokens: stop tokens before min_tokens
    penalties: _Penalties | None
    temperature: mx.array | None  # None: all greedy
    filters: list[ops.Filters]


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raise SamplingError for token ids or logprobs beyond the vocabulary."""
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise SamplingError(
                Option(name),
                f" must be at most the vocabulary's size, {vocab_size}, "
                f"got {show(getattr(params, name))}",
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


def prompt_logprobs(logits: mx.array, targets: mx.array, k: int) -> Logprobs[mx.array]:
    """Score each target (P,) int and the k most likely tokens under logits (P, V), any float type.

    Lazy.  Works in parts, so that one part's float32 values are freed before the next part.
    """
    parts = [
        ops.gather_logprobs(logits[at : at + _PART], targets[at : at + _PART], k)
        for at in range(0, len(targets), _PART)
    ]
    if len(parts) == 1:
        return parts[0]
    return Logprobs(*(mx.concatenate(list(column)) for column in zip(*parts, strict=True)))


def _mix(z: np.ndarray) -> np.ndarray:
    """The output function of splitmix64: uint64 to well-mixed uint64, one to one."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # the increment of splitmix64


class Sampler:
    """Samples for up to max_num_seqs requests, each identified by its req_index.

    Host tables hold each request's options.  A step's options go to the device only when its rows
    change.  Token counts of requests with penalties stay on the device, (rows, V) uint32 holding
    2 * (times generated) + (in the prompt).  The device updates these counts, so a step can be
    built before the previous step's tokens are known.

    ranks: all of them sample, and take rank 0's tokens: chips of several kinds round differently.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, ranks: RankGroup = ALONE) -> None:
        self.max_num_seqs, self._ranks = max_num_seqs, ranks
        self.vocab_size = vocab_size
        self._rows = np.full(max_num_seqs, _NEUTRAL)
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # token ids, addends
        self._ends: dict[int, tuple[np.ndarray, int]] = {}  # stop token ids, min_tokens
        self._allowed: dict[int, np.ndarray] = {}  # req_index -> bits, see TokenMasks
        self._named: dict[int, Sequence[int]] = {}  # req_index -> tokens to score
        self._bad_words = BadWords(max_num_seqs, vocab_size)
        self._no_counts = mx.array(np.zeros((0, vocab_size), np.uint32))
        self._seen = self._no_counts
        self._version = 0  # of the tables
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
        row = self._rows[req_index]
        row["seed"] = _mix(np.array([seed & (2**64 - 1)], np.uint64) + _INCREMENT)[0]
        row["num_generated"] = len(token_ids) - num_prompt_tokens
        row["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
        if logprob_token_ids:
            row["num_logprobs"] = len(logprob_token_ids)
            self._named[req_index] = logprob_token_ids
        if not params.greedy:
            row["temperature"] = temperature = min(params.temperature, _LARGE)
            if params.min_p > 0:
                row["min_p"] = temperature * log(params.min_p)
            if 0 < params.top_k < self.vocab_size:
                row["top_k"] = params.top_k
            if params.top_p < 1:
                row["top_p"] = 1 - params.top_p
        row["repetition"] = min(max(params.repetition_penalty, 1 / _LARGE), _LARGE)
        row["frequency"] = params.frequency_penalty
        row["presence"] = params.presence_penalty
        self._add_bias(req_index, params)
        self._add_ends(req_index, params, eos_token_ids)
        if (row["repetition"], row["frequency"], row["presence"]) != (1, 0, 0):
            row["counts_row"] = self._take_counts_row(np.asarray(token_ids), num_prompt_tokens)
        self._bad_words.add(req_index, bad_words, np.asarray(token_ids)[num_prompt_tokens:])
        if params.allowed_token_ids is not None:
            self._allowed[req_index] = pack_mask(params.allowed_token_ids, self.vocab_size)

    def _add_bias(self, req_index: int, params: SamplingParams) -> None:
        bias = {t: b for t, b in (params.logit_bias or {}).items() if 0 <= t < self.vocab_size}
        if bias:
            addends = np.array(list(bias.values()), np.float64)
            addends = np.where(np.isfinite(addends), np.clip(addends, -_LARGE, _LARGE), addends)
            self._bias[req_index] = np.array(list(bias), np.int32), addends.astype(np.float32)

    def _add_ends(
        self, req_index: int, params: SamplingParams, eos_token_ids: Sequence[int]
    ) -> None:
        if params.min_tokens > self._rows[req_index]["num_generated"]:
            ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}
            known = [t for t in ends if 0 <= t < self.vocab_size]
            if known:
                self._ends[req_index] = np.array(known, np.int32), params.min_tokens

    def remove(self, req_index: int) -> None:
        """Free the seat; no effect if the seat is free."""
        self._version += 1
        self._rows[req_index] = _NEUTRAL
        self._bias.pop(req_index, None)
        self._ends.pop(req_index, None)
        self._allowed.pop(req_index, None)
        self._named.pop(req_index, None)
        self._bad_words.remove(req_index)
        if len(self._seen) and (self._rows["counts_row"] < 0).all():
            self._seen = self._no_counts

    def _take_counts_row(self, token_ids: np.ndarray, num_prompt_tokens: int) -> int:
        """Take a free row of `seen` and fill it; `seen` grows if it has no free row."""
        num_rows = len(self._seen)
        counts_row = int(np.setdiff1d(np.arange(num_rows + 1), self._rows["counts_row"])[0])
        if counts_row == num_rows:
            num_more = min(max(num_rows, 1), self.max_num_seqs - num_rows)
            more = mx.zeros((num_more, self.vocab_size), mx.uint32)
            self._seen = mx.concatenate([self._seen, more])
        in_vocab = (token_ids >= 0) & (token_ids < self.vocab_size)
        is_prompt = np.arange(len(token_ids)) < num_prompt_tokens
        output = token_ids[in_vocab & ~is_prompt]
        seen = 2 * np.bincount(output, minlength=self.vocab_size).astype(np.uint32)
        seen[token_ids[in_vocab & is_prompt]] |= 1
        self._seen[counts_row] = mx.array(seen)
        return counts_row

    @property
    def state(self) -> SamplerState:
        """The state to restore if a step fails.  Valid until `add` or `remove`."""
        counts = self._rows["num_generated"].copy()
        return SamplerState(counts, self._seen, self._bad_words.recent)

    @state.setter
    def state(self, state: SamplerState) -> None:
        self._rows["num_generated"] = state.num_generated
        self._seen, self._bad_words.recent = state.seen, state.recent
        self._metadata = None

    def __call__(
        self,
        logits: mx.array,
        req_indices: np.ndarray,
        grammar: TokenMasks | None = None,
        draft_token_ids: np.ndarray = NO_DRAFTS,
    ) -> SamplerOutput:
        """Choose the next token of each row; lazy: nothing is evaluated.

        logits: (T, V) float32, float16 or bfloat16.  req_indices: (T,) int, the request of each
        row, all distinct except for drafts.  Counts one more generated token for each.  If any
        request wants logprobs, all rows get the largest number requested.  grammar: the tokens a
        grammar allows some rows in this step, applied before logprobs.
        draft_token_ids: see ForwardBatch; empty: no drafts.  A row behind drafts is sampled as if
        these were the request's tokens.  With drafts nothing is counted: `accept` follows.
        """
        if logits.shape != (len(req_indices), self.vocab_size):
            raise ValueError(
                f"logits must be ({len(req_indices)}, {self.vocab_size}), got {logits.shape}"
            )
        drafts = Drafts.of(draft_token_ids) if len(draft_token_ids) else None
        metadata = self._metadata_for(req_indices, drafts)
        if grammar is not None:
            logits = DeviceMasks(grammar, len(req_indices)).apply(logits)
        x = logits
        if metadata.allowed is not None:
            x = metadata.allowed.apply(x)
        if metadata.bad_words is not None:
            x = self._bad_words.ban(x.astype(mx.float32), metadata.bad_words)
        if metadata.bias is not None:
            rows, tokens, addends = metadata.bias
            x = x.astype(mx.float32).at[rows, tokens].add(addends)
        if metadata.ends is not None:
            x = hold_back_ends(x, *metadata.ends, grammar)
        if (penalties := metadata.penalties) is not None:
            x = self._penalize(x.astype(mx.float32), penalties)
        if metadata.temperature is not None:
            x = x.astype(mx.float32)
            table = self._rows[req_indices]
            count = table["num_generated"].astype(np.uint64)
            counter = (count if drafts is None else count + drafts.depth) * _INCREMENT
            keys = mx.array(_mix(table["seed"] + counter).view(np.uint32).reshape(-1, 2))
            bits = ops.random_bits(keys, self.vocab_size)
            if metadata.filters:
                floor = ops.thresholds(x, metadata.filters)
                x = ops.perturb_above(x, floor, bits, metadata.temperature)
            else:
                x = ops.perturb(x, bits, metadata.temperature)
        token_ids = self._ranks.first_array(ops.argmax(x).view(mx.int32))
        for_host = no_token.mark(x, token_ids)
        if drafts is None:
            self._count(token_ids, req_indices, metadata)
        logprobs = None
        if metadata.num_logprobs >= 0:
            logprobs = ops.gather_logprobs(logits, token_ids, metadata.num_logprobs, metadata.named)
        return SamplerOutput(token_ids, logprobs, for_host)

    def _count(
        self, token_ids: mx.array, req_indices: np.ndarray, metadata: _SamplingMetadata
    ) -> None:
        """Count the step's tokens, one a request, which only the device knows yet."""
        if (penalties := metadata.penalties) is not None:
            drawn = token_ids if penalties.rows is None else token_ids[penalties.rows]
            self._seen = self._seen.at[penalties.counts_rows, drawn].add(2)
        if metadata.bad_words is not None:
            self._bad_words.note(token_ids, metadata.bad_words)
        self._rows["num_generated"][req_indices] += 1
        metadata.calls_left -= 1

    def accept(self, req_index: int, token_ids: Sequence[int]) -> None:
        """Count a request's tokens of a step with drafts."""
        row = self._rows[req_index]
        row["num_generated"] += len(token_ids)
        if row["counts_row"] >= 0:
            counts_rows = mx.full(len(token_ids), int(row["counts_row"]), mx.int32)
            self._seen = self._seen.at[counts_rows, mx.array(list(token_ids))].add(2)
        self._bad_words.accept(req_index, token_ids)

    def _penalize(self, x: mx.array, penalties: _Penalties) -> mx.array:
        seen = self._seen if penalties.all_counts_rows else self._seen[penalties.counts_rows]
        if penalties.drafts is not None:
            seen = seen.at[penalties.drafts].add(2)
        rows = penalties.rows
        y = x if rows is None else x[rows]
        if penalties.repetition is not None:
            y = ops.penalize_repetition(y, seen, penalties.repetition)
        if penalties.frequency is not None:
            y = ops.penalize_frequency(y, seen, penalties.frequency, penalties.presence)
        return y if rows is None else mx.put_along_axis(x, rows[:, None], y, axis=0)

    def _metadata_for(self, req_indices: np.ndarray, drafts: Drafts | None) -> _SamplingMetadata:
        """The metadata of these rows; an unchanged decode batch reuses its metadata."""
        key = (self._version, req_indices.tobytes())
        if drafts is not None:
            self._metadata = None
            return self._make_metadata(key, req_indices, drafts)
        if self._metadata is None or self._metadata.key != key or not self._metadata.calls_left:
            self._metadata = self._make_metadata(key, req_indices, None)
        return self._metadata

    def _make_metadata(
        self, key: tuple[int, bytes], req_indices: np.ndarray, drafts: Drafts | None
    ) -> _SamplingMetadata:
        table = self._rows[req_indices]
        temperature, num_logprobs = table["temperature"], int(table["num_logprobs"].max())
        ends, calls_left = self._select_ends(req_indices, drafts)
        filters = table["min_p"], table["top_k"], table["top_p"]
        draws = temperature.any()
        return _SamplingMetadata(
            key=key,
            calls_left=calls_left,
            num_logprobs=num_logprobs,
            named=self._select_named(req_indices, num_logprobs),
            allowed=self._select_allowed(req_indices),
            bad_words=self._bad_words.of_rows(req_indices, drafts),
            bias=self._select_bias(req_indices),
            ends=ends,
            penalties=self._select_penalties(table, drafts),
            temperature=ops.column(temperature) if draws else None,
            filters=ops.make_filters(temperature, *filters, self.vocab_size) if draws else [],
        )

    def _select_penalties(self, table: np.ndarray, drafts: Drafts | None) -> _Penalties | None:
        rows = np.flatnonzero(table["counts_row"] >= 0)
        if not len(rows):
            return None
        mine = table[rows]
        repeats, counts = (mine["repetition"] != 1).any(), (mine["frequency"], mine["presence"])
        frequency, presence = map(ops.column, counts) if np.any(counts) else (None, None)
        return _Penalties(
            counts_rows=mx.array(mine["counts_row"]),
            all_counts_rows=np.array_equal(mine["counts_row"], np.arange(len(self._seen))),
            rows=ops.row_numbers(rows, len(table)),
            repetition=ops.column(mine["repetition"]) if repeats else None,
            frequency=frequency,
            presence=presence,
            drafts=None if drafts is None else drafts.before(rows),
        )

    def _select_allowed(self, req_indices: np.ndarray) -> DeviceMasks | None:
        rows = [i for i, r in enumerate(req_indices.tolist()) if r in self._allowed]
        if not rows:
            return None
        bits = np.stack([self._allowed[r] for r in req_indices[rows].tolist()])
        return DeviceMasks(TokenMasks(np.array(rows), bits), len(req_indices))

    def _select_named(self, req_indices: np.ndarray, k: int) -> mx.array | None:
        rows = [self._named.get(r, ()) for r in req_indices.tolist()]
        if not any(rows):
            return None
        return mx.array([[*row, *[-1] * (k - len(row))] for row in rows], mx.int32)

    def _select_bias(self, req_indices: np.ndarray) -> tuple[mx.array, mx.array, mx.array] | None:
        mine = [(i, *self._bias[r]) for i, r in enumerate(req_indices.tolist()) if r in self._bias]
        if not mine:
            return None
        rows = np.concatenate([np.full(len(tokens), i, np.int32) for i, tokens, _ in mine])
        tokens, addends = (np.concatenate([entry[at] for entry in mine]) for at in (1, 2))
        return mx.array(rows), mx.array(tokens), mx.array(addends)

    def _select_ends(
        self, req_indices: np.ndarray, drafts: Drafts | None
    ) -> tuple[tuple[mx.array, mx.array] | None, int]:
        """Rows and stop tokens below min_tokens, and the number of calls until the first of these
        rows reaches its min_tokens."""
        rows, tokens, calls_left = [], [], _FOREVER
        for i, r in enumerate(req_indices.tolist()):
            if r in self._ends:
                ends, min_tokens = self._ends[r]
                left = min_tokens - int(self._rows["num_generated"][r])
                left -= 0 if drafts is None else int(drafts.depth[i])
                if left > 0:
                    rows.append(np.full(len(ends), i, np.int32))
                    tokens.append(ends)
                    calls_left = min(calls_left, left)
        if not rows:
            return None, _FOREVER
        return (mx.array(np.concatenate(rows)), mx.array(np.concatenate(tokens))), calls_left
