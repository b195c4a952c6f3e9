"""The tables of the serving benchmarks, and the ratios in them."""

import sys
from collections.abc import Sequence

from tools.bench.lib.metrics import Metrics, Result

# (metric, heading, factor, format, whether more is better; None: no ratio)
Columns = Sequence[tuple[str, str, float, str, bool | None]]

COLUMNS: Columns = (
    ("output_tokens_per_s", "output tokens/s", 1, ",.0f", True),
    ("requests_per_s", "requests/s", 1, ".2f", True),
    ("ttft_median", "TTFT ms, median", 1e3, ",.1f", False),
    ("ttft_p95", "p95", 1e3, ",.1f", False),
    ("gap_median", "gap ms, median", 1e3, ".2f", False),
    ("gap_worst", "worst", 1e3, ",.1f", False),
    ("steady_tokens_per_s", "steady tokens/s", 1, ",.0f", True),
    ("steady_step_median", "ms a step", 1e3, ".2f", False),
    ("cached_tokens", "cached tokens", 1, ",.0f", None),
    ("cached_share", "of reusable", 1, ".1%", None),
    ("roofline", "of roofline", 1, ".0%", None),
    ("peak_gib", "GiB beside weights", 1, ".2f", False),
)
NEWCOMER: Columns = (
    ("newcomer_ttft", "newcomer's TTFT ms", 1e3, ",.1f", None),
    ("newcomer_tokens_per_s", "its tokens/s", 1, ",.1f", None),
    ("others_tokens_per_s", "decodes' tokens/s meanwhile", 1, ",.1f", None),
    ("idle_gap_median", "idle gap ms", 1e3, ".2f", None),
    ("busy_gap_median", "gap meanwhile, median", 1e3, ".2f", None),
    ("busy_gap_worst", "worst", 1e3, ".2f", None),
)
# The metrics of the summary.
_SPEEDS = ("output_tokens_per_s", "requests_per_s", "ttft_median", "steady_step_median")
FIRST = (*_SPEEDS, "peak_gib", "cached_share", "roofline")


def ratios(medians: dict[str, Metrics]) -> Metrics:
    """The ratio of this engine to the best of the others, for each metric."""
    found = {}
    for key, _, _, _, more in COLUMNS:
        others = [m[key] for name, m in medians.items() if name != "ours" and key in m]
        mine = medians["ours"].get(key)
        if more is None or mine is None or not others or min(mine, *others) <= 0:
            continue
        found[key] = mine / max(others) if more else min(others) / mine
    return found


def table_head(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |\n" + "| --- " * len(cells) + "|")


def print_load(result: Result, columns: Columns) -> None:
    shown = [c for c in columns if any(c[0] in m for m in result.engines.values())]
    print(
        f"\n### {result.load}: {result.name}, {result.requests:,} requests, "
        f"{result.tokens_in:,} / {result.tokens_out:,} tokens in / out\n\n"
        f"Tokens: {result.summary}.\n"
    )
    table_head(["engine", *(c[1] for c in shown)])
    for name, m in result.engines.items():
        cells = [f"{m[c[0]] * c[2]:{c[3]}}" if c[0] in m else "" for c in shown]
        print(f"| {name} | " + " | ".join(cells) + " |")
    if found := result.ratios:
        cells = [f"**{found[c[0]]:.2f}**" if c[0] in found else "" for c in shown]
        print("| ratio | " + " | ".join(cells) + " |")
    sys.stdout.flush()


def print_summary(results: Sequence[Result]) -> None:
    """Print this engine's numbers for every load, each with its ratio to the best of the others."""
    columns = [c for c in COLUMNS if c[0] in FIRST]
    print("\n### Ours, in brackets the ratios to mlx-lm at its best\n")
    table_head(["load", *(c[1] for c in columns), "tokens"])
    for result in results:
        mine, found = result.engines.get("ours", {}), result.ratios
        cells = []
        for key, _, factor, form, _ in columns:
            ratio = f" ({found[key]:.3g})" if key in found else ""
            cells.append(f"{mine[key] * factor:{form}}{ratio}" if key in mine else "")
        print(f"| {result.load} | " + " | ".join(cells) + f" | {result.summary} |")
