"""The metrics of a run, by name; times in seconds.  tables.py has their headings."""

import statistics
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tools.bench.lib.loads import WaveLoad
from vllm_metal_lite.benchmark import SETTLED, Metrics, Run, firsts, gaps, steady


def pace(tokens: int, seconds: float, waits: Sequence[float], between: Sequence[float]) -> Metrics:
    """The metrics of every load.  waits: times to the first token.  between: gaps of tokens."""
    values = {
        "output_tokens_per_s": tokens / seconds,
        "requests_per_s": len(waits) / seconds,
        "ttft_median": statistics.median(waits),
        "ttft_p90": float(np.quantile(waits, 0.9)),
    }
    if between:
        values |= {"gap_median": statistics.median(between), "gap_worst": max(between)}
    return values


def measure(load: WaveLoad, run: Run) -> Metrics:
    """Every metric of a run of an engine."""
    between = [gap for times in run.times for gap in gaps(times)]
    reusable = reusable_tokens(load, run)
    values = {
        **pace(sum(map(len, run.tokens)), run.seconds, firsts(run), between),
        "cached_tokens": run.cached_tokens,
        **({"cached_share": run.cached_tokens / reusable} if reusable > 0 else {}),
        "peak_gib": run.peak_bytes / 2**30,
    }
    if any(before is not None for before in load.follows):
        for key, is_later in (("first_ttft_median", False), ("later_ttft_median", True)):
            turns = zip(firsts(run), load.follows, strict=True)
            values[key] = statistics.median(
                wait for wait, before in turns if (before is not None) == is_later
            )
    if load.ends_with_last_wave:
        return values | newcomers(run, len(load.prompts) - len(load.waves[0].prompts))
    return values | steady(run)


def reusable_tokens(load: WaveLoad, run: Run) -> int:
    """Prompt tokens that a perfect cache would hold, because they came before in the load: those of
    the turn before with its answer, and shared tokens of all but the first request."""
    turns = [
        len(run.prompts[before]) + len(run.tokens[before])
        for before in load.follows
        if before is not None
    ]
    return sum(turns) + load.prefix_length * (len(load.prompts) - len(turns) - 1)


def newcomers(run: Run, count: int) -> Metrics:
    """The own times of the last `count` requests; the gaps of the others before these came, and
    while their prompts were computed."""
    others, mine = run.times[:-count], run.times[-count:]
    arrived, first = run.arrived[-count], max(times[0] for times in mine)
    idle, busy = [], []
    for times in others:
        for a, b in pairwise(times):
            if b <= arrived and a >= times[SETTLED - 1]:
                idle.append(b - a)
            elif b > arrived and a < first:
                busy.append(b - a)
    during = sum(arrived < t <= first for times in others for t in times)
    last = max(times[-1] for times in mine)
    return {
        "newcomer_ttft": first - arrived,
        "newcomer_tokens_per_s": sum(map(len, mine)) / (last - arrived),
        "idle_gap_median": statistics.median(idle),
        "busy_gap_median": statistics.median(busy),
        "busy_gap_worst": max(busy),
        "others_tokens_per_s": during / (first - arrived),
    }
