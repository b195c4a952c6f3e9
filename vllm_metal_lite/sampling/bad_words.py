"""Bad words.  The device matches them, since only the device has the last token in time."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.sampling.masks import TokenMasks
from vllm_metal_lite.sampling.processors import LogitsProcessor, Members, Operation, SampledRows

_ANY, _NOTHING = -1, -2  # in a word's prefix: any token; among recent tokens: no token yet


class _Words(NamedTuple):
    """A request's W words: last tokens (W,), and those before them, padded in front (W, L)."""

    last: np.ndarray
    prefix: np.ndarray


class BadWords(LogitsProcessor[_Words]):
    """Bans a bad word's last token once the tokens before it have been generated.

    recent: each request's last L generated tokens on the device, (max_num_seqs, L) int32, where L
    is at least one less than the longest word.
    """

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__()
        # Not lazy: a lazy array belongs to the thread that created it.
        self.recent = mx.array(np.full((max_num_seqs, 1), _NOTHING, np.int32))

    def add(
        self,
        req_index: int,
        words: Sequence[Sequence[int]],
        generated: np.ndarray,
        vocab_size: int,
    ) -> None:
        """generated: (n,) int, the tokens after the prompt."""
        known = [list(w) for w in words if w and 0 <= w[-1] < vocab_size]
        if not known:
            return
        longest = max(map(len, known)) - 1
        prefix = np.full((len(known), longest), _ANY, np.int32)
        for at, word in enumerate(known):
            prefix[at, longest - len(word) + 1 :] = word[:-1]
        self.seats[req_index] = _Words(np.array([word[-1] for word in known], np.int32), prefix)
        more = longest - self.recent.shape[1]
        if more > 0:
            self.recent = mx.pad(self.recent, [(0, 0), (more, 0)], constant_values=_NOTHING)
        recent = np.full(self.recent.shape[1], _NOTHING, np.int32)
        tail = generated[-len(recent) :]
        recent[len(recent) - len(tail) :] = tail
        self.recent[req_index] = mx.array(recent)

    def gather(self, members: Members[_Words], rows: SampledRows) -> Operation:
        length, counts = self.recent.shape[1], [len(words.last) for _, words in members]
        padded = [
            np.pad(
                words.prefix, [(0, 0), (length - words.prefix.shape[1], 0)], constant_values=_ANY
            )
            for _, words in members
        ]
        # The arrays have one entry for each word.
        which = np.repeat(np.array([row for row, _ in members], np.int32), counts)
        at = mx.array(which), mx.array(np.concatenate([words.last for _, words in members]))
        req_indices = rows.req_indices.astype(np.int32)
        word_seats, seats = mx.array(req_indices[which]), mx.array(req_indices)
        prefix = mx.array(np.concatenate(padded))
        drafts = None if rows.drafts is None else [*map(mx.array, rows.drafts.matrix(which))]

        def apply(x: mx.array, grammar: TokenMasks | None) -> mx.array:
            """-inf for tokens that would complete a bad word."""
            recent = self.recent[word_seats]
            if drafts is not None:
                drafted, depth = drafts
                ends = depth + mx.arange(length)
                recent = mx.take_along_axis(mx.concatenate([recent, drafted], 1), ends, 1)
            matches = ((prefix == _ANY) | (prefix == recent)).all(-1)
            return x.astype(mx.float32).at[at].add(mx.where(matches, -mx.inf, 0.0))

        def count(token_ids: mx.array) -> bool:
            recent = mx.concatenate([self.recent[seats][:, 1:], token_ids[:, None]], 1)
            # A new array: a failed step restores the old one.
            self.recent = mx.put_along_axis(self.recent, seats[:, None], recent, axis=0)
            return True

        return Operation(apply, count)

    def accept(self, req_index: int, token_ids: Sequence[int]) -> None:
        """Record a request's tokens of a step with drafts."""
        if req_index in self.seats:
            length = self.recent.shape[1]
            tail = mx.concatenate([self.recent[req_index], mx.array(list(token_ids), mx.int32)])
            self.recent[req_index] = tail[-length:]
