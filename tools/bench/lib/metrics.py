"""The metrics of a run, and whether two runs gave the same tokens."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tools.bench.lib.engines import Run
from tools.bench.lib.loads import Load
from tools.bench.lib.mlx_lm import native
from vllm_metal_lite import backend
from vllm_metal_lite.model.loader import LoadedModel

# isort: split
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

mx = backend.mx

_SETTLED = 8  # tokens of a request before its pace counts

Metrics = dict[str, float]


def gaps(times: Sequence[float]) -> list[float]:
    return np.diff(times).tolist()


def measure(load: Load, run: Run) -> Metrics:
    """Every metric of a run; times in seconds."""
    first = [t[0] - a for t, a in zip(run.times, run.arrived, strict=True)]
    between = [g for times in run.times for g in gaps(times)] or [0.0]
    values = {
        "output_tokens_per_s": sum(map(len, run.tokens)) / run.seconds,
        "requests_per_s": len(run.tokens) / run.seconds,
        "ttft_median": statistics.median(first),
        "ttft_p95": float(np.percentile(first, 95)),
        "gap_median": statistics.median(between),
        "gap_worst": max(between),
        "cached_tokens": run.cached_tokens,
        **({"cached_share": run.cached_tokens / n} if (n := run.reusable_tokens) > 0 else {}),
        "peak_gib": run.peak_bytes / 2**30,
        "seconds": run.seconds,
    }
    values.update(_newcomer(run) if load.ends_with_last_wave else _steady(run))
    return values


def _steady(run: Run) -> Metrics:
    """Tokens a second while all requests decode: until the first one ends."""
    if min(map(len, run.times)) <= _SETTLED:
        return {}
    start = max(times[_SETTLED - 1] for times in run.times)
    end = min(times[-1] for times in run.times)
    stamps = sorted({t for times in run.times for t in times if start <= t <= end})
    if len(stamps) < 3:
        return {}
    tokens = sum(start < t <= end for times in run.times for t in times)
    return {
        "steady_tokens_per_s": tokens / (end - start),
        "steady_step_median": statistics.median(gaps(stamps)),
    }


def _newcomer(run: Run) -> Metrics:
    """The last request's own times; the others' gaps before it came and while it was computed."""
    *others, mine = run.times
    arrived, first = run.arrived[-1], mine[0]
    idle, busy = [], []
    for times in others:
        for a, b in pairwise(times):
            if b <= arrived and a >= times[_SETTLED - 1]:
                idle.append(b - a)
            elif b > arrived and a < first:
                busy.append(b - a)
    during = sum(arrived < t <= first for times in others for t in times)
    return {
        "newcomer_ttft": first - arrived,
        "newcomer_tokens_per_s": len(mine) / (mine[-1] - arrived),
        "idle_gap_median": statistics.median(idle),
        "busy_gap_median": statistics.median(busy),
        "busy_gap_worst": max(busy),
        "others_tokens_per_s": during / (first - arrived),
    }


def median_of(values: Sequence[Metrics]) -> Metrics:
    """The median of each metric."""
    return {key: statistics.median(v[key] for v in values) for key in values[0]}


@dataclass(frozen=True)
class Agreement:
    """equal: requests whose tokens are all the same.  prefix: mean share of tokens before the first
    difference.  The other fields are the largest values of the `looked_at` requests that were
    computed again, in standard deviations of a row's logits.  tie: distance of the two logits where
    tokens first differ.  ours_below, theirs_below: distance of each engine's token from the best.
    noise: distance of the same logits from those that mlx-lm computes with a cache.
    """

    requests: int
    equal: int
    prefix: float
    tie: float
    noise: float
    looked_at: int
    ours_below: float = 0.0
    theirs_below: float = 0.0

    @property
    def within_ties(self) -> bool:
        """Random tokens are about 4 deviations apart, the two best of a large vocabulary 0.2.

        With experts, a rounding error can send a token to another expert, and the logits change by
        more than that, in mlx-lm alone too.
        """
        return self.tie <= max(0.1, 4 * self.noise)

    def __str__(self) -> str:
        text = f"{self.equal}/{self.requests} equal, prefix {self.prefix:.0%}"
        if self.looked_at:
            text += f", tie {self.tie:.3f}, noise {self.noise:.3f}, below the best token: ours "
            text += f"{self.ours_below:.3f}, mlx-lm's {self.theirs_below:.3f}"
        return text if self.within_ties else text + " NOT A TIE"


@dataclass(frozen=True)
class Result:
    """A load: the medians of each engine, and the metrics of its turns.

    load: the letter.  agreement: None if mlx-lm failed in all settings.  ratios: of this engine to
    mlx-lm's best.  sweep: the metrics of each setting of mlx-lm.
    """

    load: str
    name: str
    requests: int
    tokens_in: int
    tokens_out: int
    engines: dict[str, Metrics]
    turns: dict[str, list[Metrics]]
    agreement: Agreement | None
    ratios: Metrics = field(default_factory=dict)
    sweep: dict[str, Metrics] = field(default_factory=dict)

    @property
    def within_ties(self) -> bool:
        return self.agreement is None or self.agreement.within_ties

    @property
    def summary(self) -> str:
        return str(self.agreement or "mlx-lm failed in all settings")


def agree(model: LoadedModel, ours: Run, theirs: Run, most: int = 8) -> Agreement:
    """Compare greedy tokens of equal prompts.  At most `most` differences are examined, each with
    two forwards of the unmodified model, without a cache and with one."""
    equal, shares, ties, noises, below = 0, [], [0.0], [0.0], [(0.0, 0.0)]
    prompts = zip(ours.prompts, theirs.prompts, strict=True)
    for (prompt, other), a, b in zip(prompts, ours.tokens, theirs.tokens, strict=True):
        if prompt != other:  # earlier turns differ
            continue
        n = min(len(a), len(b))  # runs that were cut short have different lengths
        at = next((i for i in range(n) if a[i] != b[i]), n)
        equal += at == n
        shares.append(at / n if n else 1.0)
        if at < n and len(ties) <= most:
            logits, again = _last_logits(native(model), mx.array([prompt + a[:at]]))
            logits, again = logits / logits.std(), again / logits.std()
            ours_below, theirs_below = (float(logits.max() - logits[t[at]]) for t in (a, b))
            below.append((ours_below, theirs_below))
            ties.append(abs(ours_below - theirs_below))
            noises.append(float((again - logits).std()))
    largest = (max(of_one) for of_one in zip(*below, strict=True))
    mean, farthest = statistics.mean(shares), (max(ties), max(noises))
    return Agreement(len(shares), equal, mean, *farthest, len(ties) - 1, *largest)


def _last_logits(model: nn.Module, tokens: mx.array) -> tuple[mx.array, mx.array]:
    """The last row's logits, without a cache and with one, as decoding computes them."""
    cache = make_prompt_cache(model)
    mx.eval(model(tokens[:, :-1], cache=cache))
    rows = model(tokens), model(tokens[:, -1:], cache=cache)
    whole, decoded = (row[0, -1].astype(mx.float32) for row in rows)
    return whole, decoded
