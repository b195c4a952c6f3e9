"""Answers under a Constraint, without a model."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_metal_lite.sampling.masks import Constraint


def mask_of(constraint: Constraint, vocab_size: int) -> np.ndarray | None:
    """Which tokens may come next, (vocab_size,) bool; None: any."""
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    if not constraint.fill(bits):
        return None
    return np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size] > 0


def allowed(constraint: Constraint, vocab_size: int) -> set[int] | None:
    """The token ids that may come next; None: any."""
    mask = mask_of(constraint, vocab_size)
    return None if mask is None else set(np.flatnonzero(mask).tolist())


def accepts(tokenizer: Any, grammar: str, tokens: Sequence[int]) -> bool:
    """Whether tokens are a whole answer under a grammar, to llguidance."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens([*tokens]) == len(tokens) and matcher.is_accepting()


def accept(limits: Constraint, *tokens: int) -> None:
    for token in tokens:
        limits.accept(token)


def walk(
    constraint: Constraint, vocab_size: int, rng: np.random.Generator, most: int, eos: int
) -> list[int]:
    """A random answer of at most `most` tokens, EOS included; sometimes tokens are taken back."""
    tokens: list[int] = []
    while len(tokens) < most and eos not in tokens:
        forced = constraint.forced()
        ids = allowed(constraint, vocab_size)
        if forced:
            assert ids is None or forced[0] in ids
        token = forced[0] if forced else int(rng.choice(sorted(ids or range(vocab_size))))
        constraint.accept(token)
        tokens.append(token)
        if rng.random() < 0.1 and eos not in tokens:
            count = int(rng.integers(1, min(3, len(tokens)) + 1))
            constraint.rollback(count)
            del tokens[-count:]
    return tokens


def guided_answer(
    limits: Constraint,
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
            mask = mask_of(limits, vocab_size)
            assert mask is not None
            assert mask.any(), answer
            liked = [token for token in [*left, *eos] if mask[token]][:1]
            if len(answer) // 150 % 2:  # in turns: objects may have any number of keys
                liked = [token for token in [*eos, *closing] if mask[token]] or liked
            elif not liked:
                liked = [token for token in [*wanted, *closing] if mask[token]]
            if not liked or (len(answer) < 60 and rng.random() < 0.1):
                liked = np.flatnonzero(mask).tolist()
            tokens = [rng.choice(liked)]
        for token in tokens:
            if token in eos:
                return answer
            limits.accept(token)
            answer.append(token)
            left = left if token in left else list(wanted)
            left = left[left.index(token) + 1 :] if token in left else []
    raise AssertionError(f"the answer does not end: {answer}")


def tempted_answer(
    limits: Constraint,
    vocab_size: int,
    eos: Sequence[int],
    wanted: Sequence[int],
    rng: random.Random,
    stray: float,
) -> list[int]:
    """At most 400 tokens of an answer: those of `wanted` that the mask allows, in order, and then
    the end.  A part (`stray`) of them, and tokens where none of these may come, are random."""
    answer: list[int] = []
    left = list(wanted)
    while len(answer) < 400:
        mask = mask_of(limits, vocab_size)
        assert mask is not None
        assert mask.any(), answer
        ends = [token for token in eos if mask[token]]
        if ends and not left:
            break
        at = next((i for i, token in enumerate(left) if mask[token]), None)
        if forced := limits.forced():
            token = forced[0]
            assert mask[token]
        elif at is None or rng.random() < stray:
            token = int(rng.choice(np.flatnonzero(mask)))
        else:
            token = left[at]
        if token in eos:
            break
        limits.accept(token)
        answer.append(token)
        left = left[at + 1 :] if at is not None and token == left[at] else left
    return answer
