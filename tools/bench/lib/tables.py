"""The tables of the benchmarks of engines and of servers, and the ratios in them."""

from typing import NamedTuple

from tools.lib.frame import print_table
from vllm_metal_lite.benchmark import Metrics, ratio


class Column(NamedTuple):
    """A metric in a table.  more: whether a larger value is better; None: it gets no ratio."""

    key: str
    heading: str
    form: str
    factor: float = 1
    more: bool | None = None

    def text(self, metrics: Metrics) -> str:
        return f"{metrics[self.key] * self.factor:{self.form}}" if self.key in metrics else ""


COLUMNS = (
    Column("done", "done", ",.0f"),
    Column("output_tokens_per_s", "output tokens/s", ",.0f", more=True),
    Column("requests_per_s", "requests/s", ".2f", more=True),
    Column("sessions_per_minute", "sessions a minute", ".1f", more=True),
    Column("ttft_median", "TTFT ms, median", ",.1f", 1e3, more=False),
    Column("ttft_p90", "p90", ",.1f", 1e3, more=False),
    Column("first_ttft_median", "of first turns", ",.1f", 1e3, more=False),
    Column("later_ttft_median", "of later turns", ",.1f", 1e3, more=False),
    Column("gap_median", "gap ms, median", ".2f", 1e3, more=False),
    Column("gap_worst", "worst", ",.1f", 1e3, more=False),
    Column("steady_tokens_per_s", "steady tokens/s", ",.0f", more=True),
    Column("steady_step_median", "ms a step", ".2f", 1e3, more=False),
    Column("cached_tokens", "cached tokens", ",.0f"),
    Column("cached_share", "of reusable", ".1%"),
    Column("cached_prompt_share", "of prompts cached", ".1%"),
    Column("roofline", "of roofline", ".0%"),
    Column("server_cpu_per_token", "server CPU ms a token", ".3f", 1e3),
    Column("peak_gib", "GiB beside weights", ".2f", more=False),
    Column("server_gb", "peak GB of the server", ".1f", more=False),
)
NEWCOMER = (
    Column("newcomer_ttft", "newcomer's TTFT ms", ",.1f", 1e3),
    Column("newcomer_tokens_per_s", "its tokens/s", ",.1f"),
    Column("others_tokens_per_s", "decodes' tokens/s meanwhile", ",.1f"),
    Column("idle_gap_median", "idle gap ms", ".2f", 1e3),
    Column("busy_gap_median", "gap meanwhile, median", ".2f", 1e3),
    Column("busy_gap_worst", "worst", ".2f", 1e3),
)


def ratios(medians: dict[str, Metrics]) -> Metrics:
    """The ratio of "ours" to the best of the others, for each metric."""
    found = {}
    for key, _, _, _, more in COLUMNS:
        others = [m[key] for name, m in medians.items() if name != "ours" and key in m]
        mine = medians.get("ours", {}).get(key)
        if more is None or not others:
            continue
        if times := ratio(mine, max(others) if more else min(others), more):
            found[key] = times
    return found


def print_medians(medians: dict[str, Metrics]) -> None:
    """Print a row for each engine or server, and the ratios, if there are any."""
    is_newcomer = any(NEWCOMER[0].key in m for m in medians.values())
    columns = NEWCOMER if is_newcomer else COLUMNS
    shown = [c for c in columns if any(c.key in m for m in medians.values())]
    rows = [[name, *(c.text(m) for c in shown)] for name, m in medians.items()]
    found = ratios(medians)
    if any(c.key in found for c in shown):
        bold = [f"**{found[c.key]:.2f}**" if c.key in found else "" for c in shown]
        rows.append(["ratio", *bold])
    print_table(["", *(c.heading for c in shown)], rows)
