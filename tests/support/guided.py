"""Random answers under a Constraint."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_metal_lite.sampling.constraint import Constraint


def allowed(constraint: Constraint, vocab_size: int) -> set[int] | None:
    """The token ids that may come next; None: any."""
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    if not constraint.fill(bits):
        return None
    ids = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size])
    return set(ids.tolist())


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
