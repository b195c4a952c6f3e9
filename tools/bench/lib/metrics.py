"""The metrics of a run, by name; times in seconds.  tables.py has their headings."""

import statistics
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tools.bench.lib.driver import Run
from tools.bench.lib.loads import Load

_SETTLED = 8  # tokens of a request before its pace counts

Metrics = dict[str, float]


def gaps(times: Sequence[float]) -> list[float]:
    return np.diff(times).tolist()


def pace(tokens: int, seconds: float, firsts: Sequence[float], between: Sequence[float]) -> Metrics:
    """The metrics of every load.  firsts: times to the first token.  between: gaps of tokens."""
    values = {
        "output_tokens_per_s": tokens / seconds,
        "requests_per_s": len(firsts) / seconds,
        "ttft_median": statistics.median(firsts),
        "ttft_p90": float(np.quantile(firsts, 0.9)),
    }
    if between:
        values |= {"gap_median": statistics.median(between), "gap_worst": max(between)}
    return values


def measure(load: Load, run: Run) -> Metrics:
    """Every metric of a run of an engine."""
    firsts = [t[0] - a for t, a in zip(run.times, run.arrived, strict=True)]
    between = [gap for times in run.times for gap in gaps(times)]
    values = {
        **pace(sum(map(len, run.tokens)), run.seconds, firsts, between),
        "cached_tokens": run.cached_tokens,
        **({"cached_share": run.cached_tokens / n} if (n := run.reusable_tokens) > 0 else {}),
        "peak_gib": run.peak_bytes / 2**30,
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
    """The median of each metric that all of them have."""
    keys = [key for key in values[0] if all(key in v for v in values)]
    return {key: statistics.median(v[key] for v in values) for key in keys}
