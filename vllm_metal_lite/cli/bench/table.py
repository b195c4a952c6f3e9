"""The results of `bench` as a table for people, and as rows of a report."""

from collections.abc import Sequence
from typing import Any

from vllm_metal_lite.cli.bench.engines import MlxLm, ThisEngine
from vllm_metal_lite.cli.bench.suite import Result, Timing

# heading, field of Timing, factor, whether more is better
COLUMNS = (
    ("first token, ms", "seconds_to_first", 1e3, False),
    ("prompt tokens/s", "prompt_rate", 1, True),
    ("decode tokens/s", "decode_rate", 1, True),
)
OURS, PEER = ThisEngine.name, MlxLm.name
_WIDTH = 8  # of a number


def table(results: Sequence[Result]) -> list[str]:
    """Lines, by context and number of requests; a ratio above 1: ours is better."""
    compared = any(PEER in result.timings for result in results)
    names = [OURS, PEER, "ratio"] if compared else []
    width = (_WIDTH + 1) * max(len(names), 2)
    lines = ["context reqs" + "".join(f"{heading:>{width}}" for heading, *_ in COLUMNS)]
    if compared:
        lines.append(" " * 12 + "".join(f"{name:>{_WIDTH + 1}}" for name in names * len(COLUMNS)))
    for result in sorted(results, key=lambda r: (r.case.context, r.case.requests)):
        line = f"{result.case.context:>7,} {result.case.requests:>4}"
        if result.skipped is not None:
            lines.append(f"{line}   skipped: {result.skipped}")
            continue
        for _, field, factor, more in COLUMNS:
            values = [getattr(t, field) for t in result.timings.values()]
            cells = ["-" if v is None else f"{v * factor:,.0f}" for v in values]
            if compared:
                times = ratio(result.timings, field, more)
                cells.append("-" if times is None else f"{times:.2f}")
            line += "".join(f"{cell:>{width // len(cells)}}" for cell in cells)
        lines.append(line + " *" * (result.turns == 1))
    if any(result.turns == 1 for result in results):
        lines.append("*: measured once, for lack of time; compiling kernels may be included")
    if compared:
        lines.append("ratio: how many times better ours is")
    return lines


def ratio(timings: dict[str, Timing], field: str, more: bool) -> float | None:
    """How many times better ours is; None if one of the two has no number."""
    ours, theirs = (getattr(timings[name], field) for name in (OURS, PEER))
    if not (ours and theirs):
        return None
    return ours / theirs if more else theirs / ours


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The results as JSON."""
    done = []
    for result in results:
        row: dict[str, Any] = {"requests": result.case.requests, "context": result.case.context}
        if result.skipped is not None:
            done.append({**row, "skipped": result.skipped})
            continue
        once, timings = result.turns == 1, result.timings
        row |= {"turns_counted": result.turns - (not once), "compiling_included": once}
        row |= {name.replace("-", "_"): timing._asdict() for name, timing in timings.items()}
        if PEER in timings:
            row["ratios"] = {f: ratio(timings, f, more) for _, f, _, more in COLUMNS}
        done.append(row)
    return done
