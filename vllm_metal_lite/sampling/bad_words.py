"""Bad words.  The device matches them, since only the device has the last token in time."""

from collections.abc import Sequence

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.sampling.masks import TokenMasks
from vllm_metal_lite.sampling.processors import (
    LogitsProcessor,
    Members,
    Operation,
    Rows,
    SeatedRequest,
)

_ANY, _NOTHING = -1, -2  # in a word's prefix: any token; among recent tokens: no token yet


_Words = tuple[np.ndarray, np.ndarray]


class BadWords(LogitsProcessor[_Words]):
    """Bans a bad word's last token once the tokens before it have been generated.

    A seat keeps the last tokens (W,) of its W words, and the tokens before them, padded in front
    (W, L).
    recent: each request's last L generated tokens on the device, (max_num_seqs, L) int32, where L
    is at least one less than the longest word.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        super().__init__(vocab_size)
        # Not lazy: a lazy array belongs to the thread that created it.
        self.recent = mx.array(np.full((max_num_seqs, 1), _NOTHING, np.int32))

    def add(self, req_index: int, request: SeatedRequest) -> None:
        known = [list(w) for w in request.bad_words if w and 0 <= w[-1] < self.vocab_size]
        if not known:
            return
        longest = max(map(len, known)) - 1
        prefix = np.full((len(known), longest), _ANY, np.int32)
        for at, word in enumerate(known):
            prefix[at, longest - len(word) + 1 :] = word[:-1]
        self.seats[req_index] = np.array([word[-1] for word in known], np.int32), prefix
        more = longest - self.recent.shape[1]
        if more > 0:
            self.recent = mx.pad(self.recent, [(0, 0), (more, 0)], constant_values=_NOTHING)
        recent = np.full(self.recent.shape[1], _NOTHING, np.int32)
        tail = request.token_ids[request.num_prompt_tokens :][-len(recent) :]
        recent[len(recent) - len(tail) :] = tail
        self.recent[req_index] = mx.array(recent)

    def gather(self, members: Members[_Words], rows: Rows) -> Operation:
        req_indices, drafts = rows
        length, counts = self.recent.shape[1], [len(last) for _, (last, _) in members]
        padded = [
            np.pad(prefix, [(0, 0), (length - prefix.shape[1], 0)], constant_values=_ANY)
            for _, (_, prefix) in members
        ]
        # The arrays have one entry for each word.
        which = np.repeat(np.array([row for row, _ in members], np.int32), counts)
        at = mx.array(which), mx.array(np.concatenate([last for _, (last, _) in members]))
        req_indices = req_indices.astype(np.int32)
        word_seats, seats = mx.array(req_indices[which]), mx.array(req_indices)
        prefix = mx.array(np.concatenate(padded))
        before = None
        if drafts is not None:
            before = mx.array(drafts.token_ids[which]), mx.array(drafts.depth[which][:, None])

        def apply(x: mx.array, grammar: TokenMasks | None) -> mx.array:
            """-inf for tokens that would complete a bad word."""
            recent = self.recent[word_seats]
            if before is not None:
                drafted, depth = before
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
        if req_index in self.seats:
            length = self.recent.shape[1]
            tail = mx.concatenate([self.recent[req_index], mx.array(list(token_ids), mx.int32)])
            self.recent[req_index] = tail[-length:]
