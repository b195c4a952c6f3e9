"""The loads of the serving benchmarks."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.benchmark import Load, Run


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


class WaveLoad(Load):
    """waves: in order of arrival; turns of conversations come last.

    ends_with_last_wave: the run ends when the last wave is done, even if other requests still run.
    """

    def __init__(
        self, waves: list[Wave], prefix_length: int = 0, ends_with_last_wave: bool = False
    ) -> None:
        limits = [n for w in waves for n in w.max_tokens]
        waits = [not ends_with_last_wave or w is waves[-1] for w in waves for _ in w.prompts]
        needed = [n * is_waited for n, is_waited in zip(limits, waits, strict=True)]
        super().__init__([p for w in waves for p in w.prompts], limits, needed, prefix_length)
        self.waves, self.ends_with_last_wave = waves, ends_with_last_wave
        self.follows = [f for w in waves for f in w.follows or [None] * len(w.prompts)]

    def arrivals(self, run: Run) -> Iterator[list[range]]:
        waves = [w for w in self.waves if w.follows is None]
        turns = {i: before for i, before in enumerate(self.follows) if before is not None}
        latest = range(0)  # requests of the last wave that came
        while True:
            due = []
            if waves and all(len(run.tokens[i]) >= waves[0].after for i in latest):
                latest = range(latest.stop, latest.stop + len(waves.pop(0).prompts))
                due.append(latest)
            for i, before in list(turns.items()):
                if len(run.tokens[before]) == self.max_tokens[before]:
                    del turns[i]
                    run.prompts[i] = run.prompts[before] + run.tokens[before] + run.prompts[i]
                    due.append(range(i, i + 1))
            yield due

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

    @property
    def is_even(self) -> bool:
        """Whether all requests come at once, are of one size, and share nothing."""
        lengths, tokens = {len(prompt) for prompt in self.prompts}, set(self.max_tokens)
        return len(self.waves) == len(lengths) == len(tokens) == 1 and not self.prefix_length


class Sizes:
    """Token ids from a fixed seed, and numbers under one scale (never below `least`).

    vocabulary: the ids, or their number.
    """

    def __init__(self, vocabulary: np.ndarray | int, scale: float) -> None:
        self.vocabulary, self.scale = vocabulary, scale
        self.rng = np.random.default_rng(0)

    def __call__(self, n: float, least: int = 1) -> int:
        return max(int(n * self.scale), least)

    def tokens(self, n: int) -> list[int]:
        return self.rng.choice(self.vocabulary, n).tolist()

    def between(self, low: int, high: int, count: int) -> list[int]:
        return self.rng.integers(low, high + 1, count).tolist()


def uniform(s: Sizes) -> WaveLoad:
    """64 requests of 128 to 1,024 tokens in, 128 out, all at once."""
    count, out = s(64, 4), s(128, 8)
    lengths = s.between(s(128, 8), s(1024, 32), count)
    return WaveLoad([Wave([s.tokens(n) for n in lengths], [out] * count)])


def mixed(s: Sizes) -> WaveLoad:
    """32 requests, prompts lognormal around 500 tokens, 40 to 220 out, all at once."""
    count = s(32, 4)
    lengths = np.clip(s.rng.lognormal(np.log(500), 0.8, count), 32, 2048)
    prompts = [s.tokens(s(n, 8)) for n in lengths]
    return WaveLoad([Wave(prompts, s.between(s(40, 9), s(220, 12), count))])


def decodes(s: Sizes) -> WaveLoad:
    """64 requests whose context is 700 on average while they decode 256 tokens."""
    count, out = s(64, 4), s(256, 32)
    prompts = [s.tokens(s(700, 32) - out // 2) for _ in range(count)]
    return WaveLoad([Wave(prompts, [out] * count)])


def single(s: Sizes) -> WaveLoad:
    """One request, 512 tokens in, 256 out."""
    return WaveLoad([Wave([s.tokens(s(512, 8))], [s(256, 8)])])


def agents(s: Sizes) -> WaveLoad:
    """32 requests that share 4,600 tokens, with 64 of their own, 70 out, in four waves.  A wave
    comes when all requests of the one before have half of their answers."""
    per_wave, out, own = s(8, 2), s(70, 8), s(64, 4)
    prefix = s.tokens(s(4600, 64))
    waves = [
        Wave([prefix + s.tokens(own) for _ in range(per_wave)], [out] * per_wave, out // 2)
        for _ in range(4)
    ]
    return WaveLoad(waves, len(prefix))


def users(s: Sizes, count: int = 6, turns: int = 3) -> WaveLoad:
    """6 users that share 3,000 tokens; each asks 3 times 100 tokens and gets 120.  The first
    user comes alone, the others after its first token."""
    own, out, prefix = s(100, 4), s(120, 10), s.tokens(s(3000, 64))
    waves = [
        Wave([prefix + s.tokens(own) for _ in range(n)], [out] * n, after)
        for n, after in ((1, 0), (count - 1, 1))
    ]
    for turn in range(1, turns):
        before = list(range((turn - 1) * count, turn * count))
        waves.append(Wave([s.tokens(own) for _ in before], [out] * count, follows=before))
    return WaveLoad(waves, len(prefix))


def newcomer(s: Sizes) -> WaveLoad:
    """Four decodes at a context of 512, then a prompt of 4,096 tokens, 64 out."""
    decoding = Wave([s.tokens(s(512, 8)) for _ in range(4)], [s(2048, 512)] * 4)
    late = Wave([s.tokens(s(4096, 64))], [s(64, 4)], s(64, 24))
    return WaveLoad([decoding, late], ends_with_last_wave=True)


def short_even(s: Sizes) -> WaveLoad:
    """16 requests, 128 tokens in, 64 out, all at once."""
    return WaveLoad([Wave([s.tokens(s(128, 8)) for _ in range(16)], [s(64, 8)] * 16)])


def short_uniform(s: Sizes) -> WaveLoad:
    """16 requests of 16 to 512 tokens in, 8 to 64 out, all at once."""
    prompts = [s.tokens(n) for n in s.between(s(16), s(512, 32), 16)]
    return WaveLoad([Wave(prompts, s.between(s(8), s(64, 8), 16))])


def short_prefix(s: Sizes) -> WaveLoad:
    """16 requests that share 512 tokens, with 16 of their own, 32 out, all at once."""
    prefix = s.tokens(s(512, 32))
    prompts = [prefix + s.tokens(s(16)) for _ in range(16)]
    return WaveLoad([Wave(prompts, [s(32, 4)] * 16)], len(prefix))


_ALL = (uniform, mixed, decodes, single, agents, users, newcomer)
_ALL += (short_even, short_uniform, short_prefix)
LOADS = {make.__name__: make for make in _ALL}
CONTENT = {name: " ".join((make.__doc__ or "").split()) for name, make in LOADS.items()}
