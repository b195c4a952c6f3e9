"""The loads of the serving benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Wave:
    """Requests that arrive together, once each request of the previous wave has `after` tokens.

    follows: for conversations instead: request i arrives when request follows[i] of the load is
    done, and its prompt is appended to that request's prompt and answer.
    """

    prompts: list[list[int]]
    max_tokens: list[int]
    after: int = 0
    follows: list[int] | None = None


@dataclass(frozen=True)
class Load:
    """waves: in order of arrival; turns of conversations come last.

    prefix_length: tokens that all prompts share, for engines whose API needs the number.
    ends_with_last_wave: the run ends when the last wave is done, even if other requests still run.
    """

    name: str
    waves: list[Wave]
    prefix_length: int = 0
    ends_with_last_wave: bool = False

    @property
    def prompts(self) -> list[list[int]]:
        return [p for w in self.waves for p in w.prompts]

    @property
    def max_tokens(self) -> list[int]:
        return [n for w in self.waves for n in w.max_tokens]

    @property
    def follows(self) -> list[int | None]:
        return [f for w in self.waves for f in w.follows or [None] * len(w.prompts)]

    @property
    def sizes(self) -> list[int]:
        """Tokens of each request at its end, with those of the turns before."""
        sizes: list[int] = []
        for prompt, n, before in zip(self.prompts, self.max_tokens, self.follows, strict=True):
            sizes.append(len(prompt) + n + (0 if before is None else sizes[before]))
        return sizes

    @property
    def longest(self) -> int:
        return max(self.sizes)


class Sizes:
    """Token ids from a fixed seed, and numbers under one scale (never below `least`)."""

    def __init__(self, vocab_size: int, scale: float) -> None:
        self.vocab_size, self.scale = vocab_size, scale
        self.rng = np.random.default_rng(0)

    def __call__(self, n: float, least: int = 1) -> int:
        return max(int(n * self.scale), least)

    def tokens(self, n: int) -> list[int]:
        return self.rng.integers(0, self.vocab_size, n).tolist()

    def between(self, low: int, high: int, count: int) -> list[int]:
        return self.rng.integers(low, high + 1, count).tolist()


def _at_once(name: str, prompts: list[list[int]], max_tokens: list[int], prefix: int = 0) -> Load:
    return Load(name, [Wave(prompts, max_tokens)], prefix)


def mixed_lengths(s: Sizes) -> list[Load]:
    """A and B: 64 requests of 128 to 1,024 tokens in, 128 out, all at once."""
    count, out = s(64, 4), s(128, 8)
    lengths = s.between(s(128, 8), s(1024, 32), count)
    return [_at_once("mixed lengths", [s.tokens(n) for n in lengths], [out] * count)]


def decode_only(s: Sizes) -> list[Load]:
    """C: 64 requests whose context is 700 on average while they decode 256 tokens."""
    count, out = s(64, 4), s(256, 32)
    prompts = [s.tokens(s(700, 32) - out // 2) for _ in range(count)]
    return [_at_once("decode only", prompts, [out] * count)]


def single(s: Sizes) -> list[Load]:
    """D: one request, 512 in, 256 out."""
    return [_at_once("one request", [s.tokens(s(512, 8))], [s(256, 8)])]


def agents(s: Sizes) -> list[Load]:
    """E: 32 requests that share 4,600 tokens, 64 of their own, 70 out, in four waves.

    A wave arrives when each request of the previous wave has half of its answer.
    """
    per_wave, out, own = s(8, 2), s(70, 8), s(64, 4)
    prefix = s.tokens(s(4600, 64))
    waves = [
        Wave([prefix + s.tokens(own) for _ in range(per_wave)], [out] * per_wave, out // 2)
        for _ in range(4)
    ]
    return [Load("agents", waves, len(prefix))]


def newcomer(s: Sizes) -> list[Load]:
    """F: four decodes at context 512, then a prompt of 4,096 tokens, 64 out."""
    decodes = Wave([s.tokens(s(512, 8)) for _ in range(4)], [s(2048, 512)] * 4)
    late = Wave([s.tokens(s(4096, 64))], [s(64, 4)], s(64, 24))
    return [Load("newcomer", [decodes, late], ends_with_last_wave=True)]


def three_kinds(s: Sizes) -> list[Load]:
    """G: prompts of 128; of 16 to 512; and 16 tokens after a shared prefix of 512."""
    long, out, count = s(512, 32), s(64, 8), 16
    lengths = s.rng.integers(long // 32, long + 1, count)
    prefix = s.tokens(long)
    return [
        _at_once("uniform", [s.tokens(long // 4) for _ in range(count)], [out] * count),
        _at_once(
            "mixed lengths", [s.tokens(int(n)) for n in lengths], s.between(out // 8, out, count)
        ),
        _at_once(
            "shared prefix",
            [prefix + s.tokens(long // 32) for _ in range(count)],
            [out // 2] * count,
            len(prefix),
        ),
    ]


def many(s: Sizes) -> list[Load]:
    """H: 32 requests, prompts lognormal around 500 tokens, 40 to 220 out, all at once."""
    count = s(32, 4)
    lengths = np.clip(s.rng.lognormal(np.log(500), 0.8, count), 32, 2048)
    prompts = [s.tokens(s(n, 8)) for n in lengths]
    return [_at_once("lognormal lengths", prompts, s.between(s(40, 9), s(220, 12), count))]


def users(s: Sizes, count: int = 6, turns: int = 3) -> list[Load]:
    """U: 6 users with a shared prefix of 3,000 tokens; each asks 3 times 100 tokens and gets 120.

    One user comes first, the others when that one has a token.  A turn follows the answer.
    """
    own, out, prefix = s(100, 4), s(120, 10), s.tokens(s(3000, 64))
    waves = [
        Wave([prefix + s.tokens(own) for _ in range(n)], [out] * n, after)
        for n, after in ((1, 0), (count - 1, 1))
    ]
    for turn in range(1, turns):
        before = list(range((turn - 1) * count, turn * count))
        waves.append(Wave([s.tokens(own) for _ in before], [out] * count, follows=before))
    return [Load(f"{count} users, {turns} turns", waves, len(prefix))]


LOADS: dict[str, Callable[[Sizes], list[Load]]] = {
    "A": mixed_lengths,
    "B": mixed_lengths,
    "C": decode_only,
    "D": single,
    "E": agents,
    "F": newcomer,
    "G": three_kinds,
    "H": many,
    "U": users,
}
