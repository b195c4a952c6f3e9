"""Limits on the next token: masks over the vocabulary, and bad words.

Both apply to all rows of a step at once, on the device: only the device has the last token in time
to match bad words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.sampling.drafts import Drafts

_ANY, _NOTHING = -1, -2  # in a word's prefix: any token; among recent tokens: no token yet


@dataclass(frozen=True)
class TokenMasks:
    """The tokens allowed in R rows of a step, in the format of grammar libraries (xgrammar).

    rows: (R,) int, distinct rows of the logits.  bits: (R, ceil(V / 32)) int32 or uint32; bit i of
    word j, counted from the low end, represents token 32 * j + i.
    """

    rows: np.ndarray
    bits: np.ndarray


def pack_mask(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """(ceil(V / 32),) uint32: the bits of these tokens; ids outside the vocabulary are ignored."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
    allowed[[t for t in token_ids if 0 <= t < vocab_size]] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)


class DeviceMasks:
    """TokenMasks on the device.  A mask may be applied in many steps."""

    def __init__(self, masks: TokenMasks, num_rows: int) -> None:
        order = np.argsort(masks.rows)
        is_all = len(masks.rows) == num_rows
        self.rows = None if is_all else mx.array(masks.rows[order].astype(np.int32))
        self.bits = mx.array(np.ascontiguousarray(masks.bits[order]).view(np.uint32))

    def apply(self, x: mx.array) -> mx.array:
        """Logits (T, V) with -inf for tokens that are not allowed, or beyond the mask's end."""
        bits = (self.bits[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
        may = bits.reshape(len(bits), -1)[:, : x.shape[1]]
        if may.shape[1] < x.shape[1]:
            may = mx.pad(may, [(0, 0), (0, x.shape[1] - may.shape[1])])
        y = x if self.rows is None else x[self.rows]
        y = mx.where(may == 1, y, mx.array(-mx.inf, x.dtype))
        return y if self.rows is None else mx.put_along_axis(x, self.rows[:, None], y, axis=0)


def hold_back_ends(
    x: mx.array, rows: mx.array, tokens: mx.array, grammar: TokenMasks | None
) -> mx.array:
    """Logits (T, V) float32 with -inf for the stop tokens of rows that must not end yet.

    A row may still end if its grammar allows nothing else, as in vLLM.  rows, tokens: (N,).
    """
    x = x.astype(mx.float32)
    held = x.at[rows, tokens].minimum(-mx.inf)
    if grammar is None:
        return held
    has_grammar = np.zeros((len(x), 1), bool)
    has_grammar[grammar.rows] = True
    is_over = mx.array(has_grammar) & (held.max(-1, keepdims=True) == -mx.inf)
    return mx.where(is_over, x, held)


def bad_word_ids(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Token ids of words, at the start of a text and after a space, as in vLLM.

    The second list counts only if its first token differs and its length is the same.
    """
    sequences = []
    for word in words:
        bare, spaced = (
            tokenizer.encode(lead + word.lstrip(), add_special_tokens=False) for lead in ("", " ")
        )
        if bare:
            sequences.append(list(bare))
        if spaced and bare and spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences.append(list(spaced))
    return sequences


@dataclass(frozen=True)
class BadWordsRows:
    """The W bad words of a step's rows.  rows, last, word_seats: (W,); prefix: (W, L).

    word_seats: the request of each word; seats: (T,), of each row.
    drafts: (W, K) int32, the drafts before each word's row, padded behind, and depth: (W, 1), their
    number; None: no drafts.
    """

    rows: mx.array
    last: mx.array
    word_seats: mx.array
    prefix: mx.array
    seats: mx.array
    drafts: tuple[mx.array, mx.array] | None


class BadWords:
    """Bans a bad word's last token once the tokens before it have been generated.

    recent: each request's last L generated tokens on the device, (max_num_seqs, L) int32, where L
    is at least one less than the longest word.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.max_num_seqs, self.vocab_size = max_num_seqs, vocab_size
        # By request: last tokens (W,), and those before them, padded in front (W, L).
        self._words: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # Not lazy: a lazy array belongs to the thread that created it.
        self.recent = mx.array(np.full((max_num_seqs, 1), _NOTHING, np.int32))

    def add(self, req_index: int, words: Sequence[Sequence[int]], generated: np.ndarray) -> None:
        """Set up a request.  generated: (n,) int, the tokens after its prompt."""
        mine = [list(w) for w in words if w and 0 <= w[-1] < self.vocab_size]
        if not mine:
            return
        longest = max(map(len, mine)) - 1
        prefix = np.full((len(mine), longest), _ANY, np.int32)
        for at, word in enumerate(mine):
            prefix[at, longest - len(word) + 1 :] = word[:-1]
        self._words[req_index] = np.array([word[-1] for word in mine], np.int32), prefix
        more = longest - self.recent.shape[1]
        if more > 0:
            self.recent = mx.pad(self.recent, [(0, 0), (more, 0)], constant_values=_NOTHING)
        recent = np.full(self.recent.shape[1], _NOTHING, np.int32)
        tail = generated[-len(recent) :]
        recent[len(recent) - len(tail) :] = tail
        self.recent[req_index] = mx.array(recent)

    def remove(self, req_index: int) -> None:
        self._words.pop(req_index, None)

    def of_rows(self, req_indices: np.ndarray, drafts: Drafts | None) -> BadWordsRows | None:
        """The bad words of these rows; None if there are none."""
        members = [(row, r) for row, r in enumerate(req_indices.tolist()) if r in self._words]
        if not members:
            return None
        words = [self._words[r] for _, r in members]
        counts, length = [len(last) for last, _ in words], self.recent.shape[1]
        rows, word_seats = np.array(members, np.int32).T
        padded = [
            np.pad(prefix, [(0, 0), (length - prefix.shape[1], 0)], constant_values=_ANY)
            for _, prefix in words
        ]
        return BadWordsRows(
            rows=mx.array(np.repeat(rows, counts)),
            last=mx.array(np.concatenate([last for last, _ in words])),
            word_seats=mx.array(np.repeat(word_seats, counts)),
            prefix=mx.array(np.concatenate(padded)),
            seats=mx.array(req_indices.astype(np.int32)),
            drafts=None if drafts is None else drafts.matrix(np.repeat(rows, counts)),
        )

    def ban(self, x: mx.array, bad_words: BadWordsRows) -> mx.array:
        """Logits (T, V) float32 with -inf for tokens that would complete a bad word."""
        recent = self.recent[bad_words.word_seats]
        if bad_words.drafts is not None:
            drafts, depth = bad_words.drafts
            at = depth + mx.arange(recent.shape[1])
            recent = mx.take_along_axis(mx.concatenate([recent, drafts], 1), at, 1)
        said = ((bad_words.prefix == _ANY) | (bad_words.prefix == recent)).all(-1)
        return x.at[bad_words.rows, bad_words.last].add(mx.where(said, -mx.inf, 0.0))

    def note(self, token_ids: mx.array, bad_words: BadWordsRows) -> None:
        """Record the sampled tokens, (T,) int32; lazy."""
        seats = bad_words.seats
        recent = mx.concatenate([self.recent[seats][:, 1:], token_ids[:, None]], 1)
        # A new array: a failed step restores the old one.
        self.recent = mx.put_along_axis(self.recent, seats[:, None], recent, axis=0)

    def accept(self, req_index: int, token_ids: Sequence[int]) -> None:
        """Record a request's tokens of a step with drafts."""
        if req_index in self._words:
            length = self.recent.shape[1]
            tail = mx.concatenate([self.recent[req_index], mx.array(list(token_ids), mx.int32)])
            self.recent[req_index] = tail[-length:]
