"""Whether two runs gave the same tokens, and if not, whether rounding explains the difference."""

import statistics
from dataclasses import dataclass

from vllm_metal_lite import backend
from vllm_metal_lite.benchmark import Run, native
from vllm_metal_lite.checks.compare_tokens import TIE_16_BIT
from vllm_metal_lite.model.loader import LoadedModel

# isort: split
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

mx = backend.mx


@dataclass(frozen=True)
class Agreement:
    """equal: requests whose tokens are all the same.  prefix: mean share of tokens before the first
    difference.  The other fields are the largest values of the `looked_at` requests that were
    computed again, in standard deviations of a row's logits.  margin: distance of the two logits at
    the first difference.  noise: distance of the same logits from those that mlx-lm computes with a
    cache.  ours_below, theirs_below: distance of each engine's token from the best.
    """

    requests: int
    equal: int
    prefix: float
    looked_at: int
    margin: float
    noise: float
    ours_below: float
    theirs_below: float

    @property
    def within_ties(self) -> bool:
        """Whether the margin is at most that of `doctor`, or four times the noise of mlx-lm alone.
        A rounding error can send a token to another expert, which changes the logits by more."""
        return self.margin <= max(TIE_16_BIT, 4 * self.noise)

    def __str__(self) -> str:
        text = f"{self.equal}/{self.requests} equal, prefix {self.prefix:.0%}"
        if self.looked_at:
            text += f", margin {self.margin:.3f}, noise {self.noise:.3f}, below the best token: "
            text += f"ours {self.ours_below:.3f}, mlx-lm's {self.theirs_below:.3f}"
        return text if self.within_ties else text + " NOT A TIE"


def agree(model: LoadedModel, ours: Run, theirs: Run, most: int = 8) -> Agreement:
    """Compare greedy tokens of equal prompts.  At most `most` differences are examined, each with
    two forwards of the unmodified model, without a cache and with one."""
    equal, shares, looked_at = 0, [], [(0.0, 0.0, 0.0, 0.0)]
    prompts = zip(ours.prompts, theirs.prompts, strict=True)
    for (prompt, other), a, b in zip(prompts, ours.tokens, theirs.tokens, strict=True):
        if prompt != other:  # earlier turns differ
            continue
        n = min(len(a), len(b))  # runs that were cut short have different lengths
        at = next((i for i in range(n) if a[i] != b[i]), n)
        equal += at == n
        shares.append(at / n if n else 1.0)
        if at < n and len(looked_at) <= most:
            logits, again = _last_logits(native(model), mx.array([prompt + a[:at]]))
            logits, again = logits / logits.std(), again / logits.std()
            below = [float(logits.max() - logits[t[at]]) for t in (a, b)]
            noise = float((again - logits).std())
            looked_at.append((abs(below[0] - below[1]), noise, *below))
    largest = map(max, zip(*looked_at, strict=True))
    return Agreement(len(shares), equal, statistics.mean(shares), len(looked_at) - 1, *largest)


def _last_logits(model: nn.Module, tokens: mx.array) -> tuple[mx.array, mx.array]:
    """The last row's logits, without a cache and with one, as decoding computes them."""
    cache = make_prompt_cache(model)
    mx.eval(model(tokens[:, :-1], cache=cache))
    rows = model(tokens), model(tokens[:, -1:], cache=cache)
    whole, decoded = (row[0, -1].astype(mx.float32) for row in rows)
    return whole, decoded
