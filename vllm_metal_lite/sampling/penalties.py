"""Repetition, frequency and presence penalties.

Token counts stay on the device.  The device updates them, so a step can be built before the
previous step's tokens are known.
"""

from collections.abc import Sequence

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.sampling import logits as ops
from vllm_metal_lite.sampling.masks import TokenMasks
from vllm_metal_lite.sampling.processors import (
    LARGE,
    LogitsProcessor,
    Members,
    Operation,
    Rows,
    SeatedRequest,
)

_OFF = (1, 0, 0)


class Penalties(LogitsProcessor[tuple[int, np.ndarray]]):
    """A seat keeps (its row of `seen`, its repetition, frequency and presence penalty as float32).

    seen: (rows, V) uint32 on the device, 2 * (times generated) + (in the prompt).
    """

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        super().__init__(vocab_size)
        self.max_num_seqs = max_num_seqs
        self._none = mx.array(np.zeros((0, vocab_size), np.uint32))
        self.seen = self._none

    def add(self, req_index: int, request: SeatedRequest) -> None:
        params, token_ids = request.params, request.token_ids
        repetition = min(max(params.repetition_penalty, 1 / LARGE), LARGE)
        values = np.array(
            [repetition, params.frequency_penalty, params.presence_penalty], np.float32
        )
        if (values == _OFF).all():
            return
        counts_row = self._take_counts_row()
        in_vocab = (token_ids >= 0) & (token_ids < self.vocab_size)
        is_prompt = np.arange(len(token_ids)) < request.num_prompt_tokens
        output = token_ids[in_vocab & ~is_prompt]
        seen = 2 * np.bincount(output, minlength=self.vocab_size).astype(np.uint32)
        seen[token_ids[in_vocab & is_prompt]] |= 1
        self.seen[counts_row] = mx.array(seen)
        self.seats[req_index] = counts_row, values

    def _take_counts_row(self) -> int:
        """A free row of `seen`, which grows if it has none."""
        num_rows = len(self.seen)
        taken = {row for row, _ in self.seats.values()}
        counts_row = min(set(range(num_rows + 1)) - taken)
        if counts_row == num_rows:
            num_more = min(max(num_rows, 1), self.max_num_seqs - num_rows)
            self.seen = mx.concatenate(
                [self.seen, mx.zeros((num_more, self.vocab_size), mx.uint32)]
            )
        return counts_row

    def remove(self, req_index: int) -> None:
        super().remove(req_index)
        if not self.seats:
            self.seen = self._none

    def gather(self, members: Members[tuple[int, np.ndarray]], rows: Rows) -> Operation:
        req_indices, drafts = rows
        which = np.array([row for row, _ in members])
        batch_rows = ops.row_numbers(which, len(req_indices))  # None: all rows
        counts_rows = np.array([seat[0] for _, seat in members], np.int32)
        all_counts_rows = np.array_equal(counts_rows, np.arange(len(self.seen)))
        seen_rows = mx.array(counts_rows)
        values = np.array([seat[1] for _, seat in members])
        repeats, counts = (values[:, 0] != 1).any(), values[:, 1:].any()
        repetition, frequency, presence = map(ops.column, values.T)
        drafted = None if drafts is None else drafts.before(which)

        def apply(x: mx.array, grammar: TokenMasks | None) -> mx.array:
            x = x.astype(mx.float32)
            seen = self.seen if all_counts_rows else self.seen[seen_rows]
            if drafted is not None:
                seen = seen.at[drafted].add(2)
            y = x if batch_rows is None else x[batch_rows]
            if repeats:
                y = _penalize_repetition(y, seen, repetition)
            if counts:
                y = _penalize_frequency(y, seen, frequency, presence)
            if batch_rows is None:
                return y
            return mx.put_along_axis(x, batch_rows[:, None], y, axis=0)

        def count(token_ids: mx.array) -> bool:
            drawn = token_ids if batch_rows is None else token_ids[batch_rows]
            self.seen = self.seen.at[seen_rows, drawn].add(2)
            return True

        return Operation(apply, count)

    def accept(self, req_index: int, token_ids: Sequence[int]) -> None:
        if req_index in self.seats:
            counts_rows = mx.full(len(token_ids), self.seats[req_index][0], mx.int32)
            self.seen = self.seen.at[counts_rows, mx.array(list(token_ids), mx.int32)].add(2)


@ops.fused
def _penalize_repetition(x: mx.array, seen: mx.array, penalty: mx.array) -> mx.array:
    """Make tokens of the prompt and the output less likely if the penalty is above 1.

    seen: (T, V) uint32, see `Penalties`; penalty: (T, 1), 1 for a row without one.
    """
    return mx.where(seen > 0, mx.where(x > 0, x / penalty, x * penalty), x)


@ops.fused
def _penalize_frequency(
    x: mx.array, seen: mx.array, frequency: mx.array, presence: mx.array
) -> mx.array:
    """Make generated tokens less likely, by their count and by their presence.

    seen: (T, V) uint32, see `Penalties`; frequency, presence: (T, 1), 0 for a row without one.
    """
    return x - frequency * (seen >> 1) - presence * (seen > 1)
