#!/usr/bin/env python3
"""The shapes that people run, on ours and on mlx-lm: one request, and 32 mixed ones.

    python -m tools.bench.shapes --results DIR --minutes 9              a GPU; again to go on
    python -m tools.bench.shapes --results DIR --only glm-4.7-flash-4
    python -m tools.bench.shapes --results DIR --tiny                   a CPU, tiny models

A part is a shape in one format: loads D and H of bench/serving.py, in a process of its own.  At the
end of --minutes the process prints the stack of every thread and ends.  What a part measured is in
DIR/PART.json as soon as a run ends, and what it prints in DIR/PART.log.  A part that is finished is
not run again.  The table at the end is made of what DIR has.

--beside LOCK: all parts start at once, since a start compiles for minutes.  A counted turn waits
until no other part warms up or is timed (lib/alone.py).  Other tools may share the lock; a process
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
from tools.bench.lib.tables import table_head
from tools.dev.run_main import run_main

_LOADS = {"D": "one request", "H": "32 mixed"}


def command(part: Part, args: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-X", "faulthandler", "-m", "tools.bench.serving", "--quick"]
    words += ["--load", *args.load, "--model", part.tiny if args.tiny else part.shape]
    words += ["--json", str(args.results / f"{part.name}.json")]
    words += ["--bits", part.bits] if part.bits else []
    words += ["--trusted"] if args.trusted else []
    words += ["--scale", "0.05"] if args.tiny else []
    words += ["--beside", str(args.beside)] if args.beside else []
    words += ["--settings", part.settings] if part.settings else []
    options = [f"{name}={value}" for name, value in (part.options or {}).items()]
    return words + (["--ours", *options] if options else [])


def read(path: Path) -> dict[str, Any]:
    """What was measured of a part; nothing if the file was cut off."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def end_by(process: subprocess.Popen, seconds: float) -> None:
    """Wait until it has ended; after `seconds` the stack of every thread is printed."""
    try:
        process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        process.wait()


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


def cells(report: dict[str, Any], load: str) -> list[str]:
    """Ours, mlx-lm at its best, and their ratio."""
    found = speeds(report.get("runs", []), load)
    ours = found.pop("ours", None)
    best = max(found.values(), default=None)
    shown = [f"{v[0]:,.0f}{'' if v[1] else ' *'}" if v else "" for v in (ours, best)]
    return [*shown, f"**{ours[0] / best[0]:.2f}**" if ours and best else ""]


def print_table(results: Path) -> None:
    heads = [f"{_LOADS[load]}: {what}" for load in _LOADS for what in ("ours", "mlx-lm", "ratio")]
    print("\nOutput tokens/s.  A star: no turn was counted.\n")
    table_head(["shape", *heads, "state"])
    for part in PARTS:
        report = read(results / f"{part.name}.json")
        failed = [f"{r['engine']}: {r['why']}" for r in report.get("runs", []) if "why" in r]
        state = "" if report.get("finished") else "cut off" if report else "not run"
        row = [cell for load in _LOADS for cell in cells(report, load)]
        print(f"| {part.name} | " + " | ".join(row) + f" | {'; '.join([state, *failed])} |")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--load", nargs="+", choices=list(_LOADS), default=list(_LOADS))
    parser.add_argument("--minutes", type=float, default=9.0, help="of all parts (default 9)")
    parser.add_argument("--trusted", action="store_true", help="as bench/serving.py has it")
    parser.add_argument("--beside", type=Path, metavar="LOCK", help="all at once, with this lock")
    parser.add_argument("--tiny", action="store_true", help="tiny models and short prompts")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    end, running = time.monotonic() + 60 * args.minutes, []
    for name in args.only:
        if read(args.results / f"{name}.json").get("finished") or time.monotonic() > end:
            continue
        with (args.results / f"{name}.log").open("w") as log:
            words = command(BY_NAME[name], args)
            running.append(subprocess.Popen(words, stdout=log, stderr=log))
        print(f"{name} has started", file=sys.stderr, flush=True)
        if not args.beside:
            end_by(running.pop(), end - time.monotonic())
    for process in running:
        end_by(process, end - time.monotonic())
    print_table(args.results)
    return 0


if __name__ == "__main__":
    run_main(main)
