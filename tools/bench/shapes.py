#!/usr/bin/env python3
"""The shapes that people run, on ours and on mlx-lm: one request, and 32 mixed ones.

    python -m tools.bench.shapes --results DIR --minutes 9              a GPU; again to go on
    python -m tools.bench.shapes --results DIR --only glm-4.7-flash-4
    python -m tools.bench.shapes --results DIR --beside LOCK            parts warm up side by side
    python -m tools.bench.shapes --results DIR --tiny                   a CPU, tiny models

A part is a shape in one format: loads D and H of bench/serving.py, in a process of its own.  At its
deadline, or at the end of --minutes, the process prints the stack of every thread and ends.  Each
run of a part is in DIR/PART.json as soon as it ends, and what a part prints in DIR/PART.log.  A
part that is finished is not run again (--again).  The table at the end is made of what DIR has.

--beside: all parts start at once, since a start compiles for minutes.  A counted turn waits until
no other part warms up or is timed (lib/alone.py).  Other tools may share the lock; one process
a load (--load D, --load H, two DIRs) waits the least.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.bench.lib.parts import BY_NAME, PARTS, Part
from tools.dev.run_main import run_main

_LOADS = {"D": "one request", "H": "32 mixed"}
_LEAST = 60.0  # seconds that a part gets


def command(part: Part, args: argparse.Namespace) -> list[str]:
    words = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "tools.bench.serving",
        "--load",
        *args.load,
    ]
    words += ["--model", part.tiny if args.tiny else part.shape]
    words += ["--json", str(file_of(part, args)), *(["--bits", part.bits] if part.bits else [])]
    words += [flag for flag, on in (("--quick", not args.sweep), ("--trusted", args.trusted)) if on]
    if args.tiny:
        words += ["--scale", "0.05"]
    if args.beside:
        words += ["--beside", str(args.beside)]
    if part.settings and not args.sweep:
        words += ["--settings", part.settings]
    if ours := [*(f"{k}={v}" for k, v in part.options.items()), *args.ours]:
        words += ["--ours", *ours]
    return words


def file_of(part: Part, args: argparse.Namespace) -> Path:
    return args.results / f"{part.name}.json"


def read(path: Path) -> dict[str, Any]:
    """What was measured of a part; nothing if the file was cut off."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def report_of(part: Part, args: argparse.Namespace) -> dict[str, Any]:
    """The last run of a part, or the one before, if that got farther."""
    path = file_of(part, args)
    reports = read(path), read(path.with_suffix(".earlier.json"))
    return max(reports, key=lambda r: (r.get("finished", False), len(r.get("runs", []))))


class Running:
    """A part in a process of its own."""

    def __init__(self, part: Part, args: argparse.Namespace) -> None:
        self.part, self.path = part, file_of(part, args)
        if self.path.exists():
            self.path.rename(self.path.with_suffix(".earlier.json"))
        with self.path.with_suffix(".log").open("w") as log:
            self._process = subprocess.Popen(command(part, args), stdout=log, stderr=log)

    def end_by(self, end: float) -> None:
        """Wait until it has ended, at `end` (time.monotonic()) at the latest."""
        problem = None
        try:
            code = self._process.wait(max(end - time.monotonic(), 0))
            if not read(self.path).get("finished"):
                problem = f"ended with {code}"
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # the stack of every thread is printed
            self._process.wait()
            problem = "did not end in time"
        print(f"\n# {self.part.name}\n\n{self.path.with_suffix('.log').read_text()}", flush=True)
        if problem:
            print(f"{self.part.name}: {problem}", file=sys.stderr, flush=True)


def speeds(runs: list[dict[str, Any]], load: str) -> dict[str, tuple[float, bool]]:
    """Output tokens a second of each engine on a load: the median of its counted turns, or of the
    last run before them; and whether turns were counted."""
    found: dict[str, tuple[float, bool]] = {}
    of_load = [r for r in runs if r["load"] == load and "metrics" in r]
    for engine in dict.fromkeys(r["engine"] for r in of_load):
        mine = [r for r in of_load if r["engine"] == engine]
        turns = [r for r in mine if r["note"].startswith("turn")]
        values = [r["metrics"]["output_tokens_per_s"] for r in turns or mine[-1:]]
        found[engine] = statistics.median(values), bool(turns)
    return found


def cells(part: Part, report: dict[str, Any], load: str) -> list[str]:
    """Ours, mlx-lm at its best, their ratio beside the bar."""
    found = speeds(report.get("runs", []), load)
    ours = found.pop("ours", None)
    best = max(found.values(), default=None)
    shown = [f"{v[0]:,.0f}{'' if v[1] else ' *'}" if v else "" for v in (ours, best)]
    ratio = f"**{ours[0] / best[0]:.2f}**" if ours and best else ""
    return [*shown, f"{ratio} of {part.bars[load]:g}"]


def print_table(args: argparse.Namespace) -> None:
    heads = [f"{_LOADS[load]}: {what}" for load in _LOADS for what in ("ours", "mlx-lm", "ratio")]
    print("\nOutput tokens/s.  A star: no turn was counted.\n")
    print("| shape | " + " | ".join(heads) + " | state |")
    print("| --- " * (len(heads) + 2) + "|")
    for part in PARTS:
        report = report_of(part, args)
        failed = [f"{r['engine']}: {r['why']}" for r in report.get("runs", []) if "why" in r]
        state = "" if report.get("finished") else "cut off" if report else "not run"
        row = [cell for load in _LOADS for cell in cells(part, report, load)]
        print(f"| {part.name} | " + " | ".join(row) + f" | {'; '.join([state, *failed])} |")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), metavar="PART")
    parser.add_argument("--load", nargs="+", choices=list(_LOADS), default=list(_LOADS))
    parser.add_argument("--minutes", type=float, default=9.0, help="of all parts (default 9)")
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds of a part")
    parser.add_argument("--ours", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--trusted", action="store_true", help="as bench/serving.py has it")
    parser.add_argument("--sweep", action="store_true", help="mlx-lm's settings; three turns")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="all at once, with this lock")
    parser.add_argument("--again", action="store_true", help="also parts that are finished")
    parser.add_argument("--tiny", action="store_true", help="tiny models and short prompts")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    end, running = time.monotonic() + 60 * args.minutes, []
    for part in PARTS:
        if args.only and part.name not in args.only:
            continue
        if report_of(part, args).get("finished") and not args.again:
            continue
        left = end - time.monotonic()
        if left < _LEAST:
            print(f"{part.name}: {left:.0f} s are left, which is too little", file=sys.stderr)
            continue
        print(f"{part.name} starts, {left:.0f} s left", file=sys.stderr, flush=True)
        running.append(Running(part, args))
        if not args.beside:
            running.pop().end_by(min(end, time.monotonic() + args.deadline))
    ends = min(end, time.monotonic() + args.deadline)
    for one in running:
        one.end_by(ends)
    print_table(args)
    return 0


if __name__ == "__main__":
    run_main(main)
