"""Answers under a grammar's masks, as an engine makes them, without a model."""

import random
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Limits(Protocol):
    """What the engine's `Constraint` has."""

    def fill(self, bits: np.ndarray) -> bool: ...
    def accept(self, token_id: int) -> None: ...
    def forced(self) -> list[int]: ...


def walk(
    limits: Limits,
    vocab_size: int,
    eos: Sequence[int],
    wanted: Sequence[int],
    closing: Sequence[int],
    rng: random.Random,
) -> list[int]:
    """Tokens up to the end of the answer: forced ones at once, the others from those that the mask
    allows.  Most of them are the next of `wanted` that is allowed, the first 60 some at random.

    closing: tokens that may end strings, lists and objects.
    """
    answer: list[int] = []
    left = list(wanted)
    while len(answer) < 1500:
        tokens = limits.forced()
        if not tokens:
            bits = np.zeros(-(-vocab_size // 32), np.uint32)
            assert limits.fill(bits)
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size]
            assert allowed.any(), answer
            liked = [token for token in [*left, *eos] if allowed[token]][:1]
            if len(answer) // 150 % 2:  # in turns: objects may have any number of keys
                liked = [token for token in [*eos, *closing] if allowed[token]] or liked
            elif not liked:
                liked = [token for token in [*wanted, *closing] if allowed[token]]
            if not liked or (len(answer) < 60 and rng.random() < 0.1):
                liked = np.flatnonzero(allowed).tolist()
            tokens = [rng.choice(liked)]
        for token in tokens:
            if token in eos:
                return answer
            limits.accept(token)
            answer.append(token)
            left = left if token in left else list(wanted)
            left = left[left.index(token) + 1 :] if token in left else []
    raise AssertionError(f"the answer does not end: {answer}")
