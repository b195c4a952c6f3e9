"""A model of numbers: wrong tokens follow from any wrong slot, block, share or lost write.

`FakeModel` keeps numbers where a real one keeps K and V, and is read and written as the real one
is: through the slots and block tables of a `ForwardBatch`, layer by layer, every row of a step
written before any is read.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from tests.support.attention.oracle import slots_of
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.scheduler.kv_groups import KVGroup

VOCAB_SIZE = 4096
MAX_LEN = 4096
_EMPTY, _UNWRITTEN = -1, (-1,)
_MASK = (1 << 64) - 1
_A = np.random.default_rng(0).integers(1, 1 << 63, (4, MAX_LEN), dtype=np.uint64) | np.uint64(1)


def splitmix64(x: Any) -> Any:
    """Its finaliser, of an array of uint64 or a Python int."""
    if isinstance(x, int):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return x ^ (x >> 31)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=100_000)
def alone(
    prompt: tuple[int, ...], max_tokens: int, windows: tuple[int | None, ...] = (None,)
) -> list[int]:
    """What a FakeModel of KV groups with these windows answers to a prompt that is alone."""
    tokens, layers = list(prompt), _layers(windows)
    past: list[list[int]] = [[] for _ in layers]  # sums up to each token
    for i in range(len(prompt) + max_tokens - 1):
        number = tokens[i]
        for layer, sums in enumerate(past):
            sums.append(((sums[-1] if i else 0) + (number + 1) * int(_A[layer, i])) & _MASK)
            start = i - (windows[layers[layer]] or MAX_LEN)
            number = splitmix64((sums[i] - (sums[start] if start >= 0 else 0)) & _MASK)
        if i >= len(prompt) - 1:
            tokens.append(number % VOCAB_SIZE)
    return tokens[len(prompt) :]


def _layers(groups: Sequence[Any]) -> list[int]:
    """The KV group of each layer of a FakeModel: there are at least two layers."""
    return list(range(len(groups))) if len(groups) > 1 else [0, 0]


class FakeModel:
    """A layer for each KV group, but at least two, each with a number a slot.

    Layer 0 stores a row's token; each further one a hash of what that row sees in the layer before,
    as a real K and V depend on earlier tokens; the next token is a hash of what a row sees in the
    last one.  states: of a recurrent layer, the tokens that each slot's state covers.
    """

    def __init__(
        self, groups: Sequence[KVGroup], block_size: int, num_state_slots: int = 0
    ) -> None:
        self.groups, self.block_size, self.layers = groups, block_size, _layers(groups)
        self.states = [_UNWRITTEN] * num_state_slots
        shapes = [(g.num_blocks, block_size) for g in groups]
        self.positions = [np.full(shape, _EMPTY, np.int64) for shape in shapes]
        self.numbers = [np.zeros(shapes[g], np.uint64) for g in self.layers]

    def poison(self, group: int, block_ids: Sequence[int]) -> None:
        """A step that reads these blocks before they are written fails."""
        self.positions[group][block_ids] = _EMPTY

    def forget(self, batch: ForwardBatch) -> None:
        """As if a step's rows had never been written."""
        for group, positions in enumerate(self.positions):
            positions.reshape(-1)[batch.slot_mapping(group)] = _EMPTY
        for slot in _written_slots(batch) if self.states else ():
            self.states[slot] = _UNWRITTEN

    def __call__(self, batch: ForwardBatch) -> list[int]:
        """Run a step; returns a token for each sampled row."""
        batch.validate(*(g.num_blocks for g in self.groups), num_state_slots=len(self.states))
        if self.states:
            self._update_states(batch)
        at = np.arange(batch.seq_lens.max())
        lengths = np.diff(batch.cu_seqlens_q)
        first = (batch.seq_lens - lengths)[:, None]
        segment = np.repeat(np.arange(batch.num_segments), lengths)
        numbers = batch.token_ids.astype(np.uint64)
        for layer, group in enumerate(self.layers):
            rows, window = batch.slot_mapping(group), self.groups[group].window or MAX_LEN
            slots = slots_of(batch.block_tables[group], at, batch.block_size)
            assert len(set(rows.tolist())) == batch.num_tokens, "a slot is written twice"
            stored, positions = self.numbers[layer].reshape(-1), self.positions[group].reshape(-1)
            stored[rows], positions[rows] = numbers, batch.positions
            seen = (at < batch.seq_lens[:, None]) & (at > first - window)
            assert (positions[slots] == at)[seen].all(), "a row reads what is not there, or moved"
            terms = np.where(seen, (stored[slots] + np.uint64(1)) * _A[layer, at], np.uint64(0))
            past = np.cumsum(terms, axis=1)
            before = batch.positions - window
            behind = np.where(before < 0, np.uint64(0), past[segment, np.maximum(before, 0)])
            numbers = splitmix64(past[segment, batch.positions] - behind)
        ends = numbers[batch.logits_indices[: len(batch.sample_segments)]]
        return (ends % np.uint64(VOCAB_SIZE)).astype(int).tolist()

    def _update_states(self, batch: ForwardBatch) -> None:
        written = {}
        for s, (first, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
            initial, start = batch.initial_slots[s], batch.positions[first]
            tokens = self.states[initial] if start else ()
            assert len(tokens) == start, "a segment starts from another position's state"
            tokens += tuple(batch.token_ids[first:end].tolist())
            written[batch.final_slots[s]] = tokens
            for segment, row, slot in batch.checkpoints.tolist():
                if segment == s:
                    is_own = slot != initial or len(batch.draft_token_ids)
                    assert is_own, "a checkpoint replaces the state that is read"
                    written[slot] = tokens[: start + row - first]
        for slot, tokens in written.items():
            self.states[slot] = tokens


def _written_slots(batch: ForwardBatch) -> list[int]:
    return [*batch.final_slots.tolist(), *batch.checkpoints[:, 2].tolist()]
