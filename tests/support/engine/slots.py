"""Constraints for tests: for each position of an answer, the tokens that may stand there."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from vllm_metal_lite.sampling.masks import pack_mask

Slots = Sequence[Sequence[int]]


def draw_slots(rng: np.random.Generator, length: int, vocab_size: int, forced: float) -> Slots:
    """`length` positions; a share `forced` of them, in runs, leaves one token."""
    slots: list[list[int]] = []
    while len(slots) < length:
        run = int(rng.integers(1, 7))
        one = rng.random() < forced
        for _ in range(run):
            count = 1 if one else int(rng.integers(2, 12))
            slots.append(rng.choice(vocab_size, count, replace=False).tolist())
    return slots[:length]


class SlotConstraint:
    """A `Constraint`.  After the last position any token may come.  seen: the answer's tokens."""

    def __init__(self, slots: Slots, vocab_size: int) -> None:
        self.slots, self.vocab_size = slots, vocab_size
        self.seen: list[int] = []

    def fill(self, bits: np.ndarray) -> bool:
        if len(self.seen) >= len(self.slots):
            return False
        bits[:] = pack_mask(self.slots[len(self.seen)], self.vocab_size)
        return True

    def accept(self, token_id: int) -> None:
        at = len(self.seen)
        assert at >= len(self.slots) or token_id in self.slots[at], f"token {token_id} at {at}"
        self.seen.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.seen)
        del self.seen[-num_tokens:]

    def error(self) -> str:
        return ""

    def forced(self) -> list[int]:
        tokens: list[int] = []
        for slot in self.slots[len(self.seen) :]:
            if len(slot) > 1:
                break
            tokens += slot
        return tokens


def alone(model, prompt: Sequence[int], slots: Slots, count: int) -> list[int]:
    """`count` greedy tokens by mlx-lm, one at a time, each within its position's tokens."""

    def limit(tokens: mx.array, logits: mx.array) -> mx.array:
        at = len(tokens) - len(prompt)
        if at >= len(slots):
            return logits
        allowed = mx.zeros(logits.shape[-1]).at[mx.array(slots[at])].add(1) > 0
        return mx.where(allowed, logits, -mx.inf)

    steps = generate_step(mx.array(prompt), model, max_tokens=count, logits_processors=[limit])
    return [int(token) for token, _ in steps]
