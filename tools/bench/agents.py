#!/usr/bin/env python3
"""Many coding agents on one machine: our server beside mlx-lm's, same weights, same sessions.

    python -m tools.bench.agents --model qwen3-4b                      a GPU
    python -m tools.bench.agents --model 256x2 --scale 0.02            a CPU

Sessions have the shape of recorded ones: a start of 25,000 tokens, of which all share 20,000
(system prompt and tools); 12 turns, each with 200 to 2,000 new tokens (lognormal) and 150 out.
Weights are random.  A system that is not done within --seconds is reported by the turns it did.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.lib.alone import Alone
from tools.bench.server import STARTED, free_port, give_up, prepare, server, words_of
from tools.dev.run_main import run_main

START, SHARED, TURNS, OUT = 25_000, 20_000, 12, 150


def new_tokens(rng: np.random.Generator, turns: int) -> np.ndarray:
    """How many tokens each turn of a session brings; the first those behind what all share."""
    new = np.clip(rng.lognormal(np.log(600), 0.7, turns), 200, 2000)
    new[0] = START - SHARED
    return new


def make_job(tokenizer: Any, count: int, turns: int, scale: float, seed: int = 0) -> dict[str, Any]:
    rng, words = np.random.default_rng(seed), words_of(tokenizer)

    def text(num_tokens: float) -> str:
        drawn: str = tokenizer.decode(rng.choice(words, max(int(num_tokens * scale), 4)).tolist())
        return drawn

    def session() -> list[list[str]]:
        return [[text(n), text(OUT)] for n in new_tokens(rng, turns)]

    return {
        "system": text(SHARED), "sessions": [session() for _ in range(count)],
        "max_tokens": max(int(OUT * scale), 4),
    }  # fmt: skip


def memory_now(pid: int) -> float:
    """GB: of the GPU if nvidia-smi knows one, else resident in a server's processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if done.returncode == 0:
            return float(done.stdout.split()[0]) * 2**20 / 1e9
    kilobytes, pids = 0, [pid]
    while pids:
        one = Path("/proc", str(pids.pop()))
        try:
            found = re.search(r"VmRSS:\s+(\d+)", (one / "status").read_text())
            pids += [
                int(n) for file in one.glob("task/*/children") for n in file.read_text().split()
            ]
        except OSError:
            continue
        kilobytes += int(found[1]) if found else 0
    return kilobytes * 1024 / 1e9


class Memory(threading.Thread):
    """The peak of a server's memory, by one look a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.ended = pid, 0.0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(1):
            self.peak = max(self.peak, memory_now(self.pid))

    def close(self) -> float:
        self.ended.set()
        self.join()
        return max(self.peak, memory_now(self.pid))


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


def run(
    name: str, command: list[str], model: str, warm: dict[str, Any], job: dict[str, Any], args: Any
) -> dict[str, Any]:
    """One system: its speed, or that of the turns that it did."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [part.replace("PORT", str(port)) for part in command]
    say(f"{name} starts")
    log = Path(args.scratch) / "log.txt"
    with server(command, port, args.deadline, log) as pid:
        say(f"{name} answers")
        memory = Memory(pid)
        memory.start()
        try:
            ask(url, {**warm, "model": model, "seconds": args.seconds})
            say(f"{name} is warm")
            with args.alone():
                done = ask(url, {**job, "model": model, "seconds": args.seconds})
        finally:
            peak = memory.close()
        metrics = {}
        if name == "ours":
            with urllib.request.urlopen(f"{url}/status", timeout=30) as reply:
                status = json.load(reply)["models"][0]
                metrics = status["metrics"]
                say(f"attention: {status['attention_reason']}")
    turns, total = done["turns"], len(job["sessions"]) * len(job["sessions"][0])
    firsts = [turn["first"] for turn in turns if turn["first"] is not None]
    later = [turn["first"] for turn in turns if turn["turn"] and turn["first"] is not None]
    gaps = [gap for turn in turns for gap in turn["gaps"]]
    row = {
        "name": name, "turns": len(turns), "of": total, "seconds": done["seconds"],
        "sessions_per_minute": 60 * len(turns) / len(job["sessions"][0]) / done["seconds"],
        "ttft": statistics.median(firsts) if firsts else None,
        "ttft_later": statistics.median(later) if later else None,
        "ttft_p90": float(np.quantile(firsts, 0.9)) if firsts else None,
        "gap": statistics.median(gaps) if gaps else None,
        "gap_p99": float(np.quantile(gaps, 0.99)) if gaps else None,
        "tokens": sum(turn["tokens"] or 0 for turn in turns), "metrics": metrics,
        "prompt_tokens": sum(turn["prompt"] or 0 for turn in turns),
        "cached_tokens": sum(turn["cached"] for turn in turns), "peak_gb": peak,
        "sessions_done": sum(turn["turn"] == len(job["sessions"][0]) - 1 for turn in turns),
    }  # fmt: skip
    say(json.dumps({k: v for k, v in row.items() if k != "metrics"}))
    if metrics:
        say(f"preemptions: {metrics['preemptions']}")
    return row


def ask(url: str, job: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench.lib.agent_client", url],
        input=json.dumps(job), capture_output=True, text=True, timeout=job["seconds"] + 60,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-800:])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def report(args: Any, rows: list[dict[str, Any]]) -> None:
    print(
        f"Model: {args.model}; {args.sessions} sessions of {args.turns} turns, scale {args.scale}"
    )
    print(
        "| system | sessions | turns | sessions a minute | median TTFT | of later turns | p90 | "
        "gap between tokens | p99 | cached tokens | peak GB |"
    )
    print("|" + " --- |" * 11)
    for row in rows:
        times = [f"{1e3 * row[k]:,.0f} ms" if row[k] is not None else "-"
                 for k in ("ttft", "ttft_later", "ttft_p90", "gap", "gap_p99")]  # fmt: skip
        cached = row["cached_tokens"] / max(row["prompt_tokens"], 1)
        print(
            f"| {row['name']} | {row['sessions_done']} | {row['turns']} of {row['of']} | "
            f"{row['sessions_per_minute']:.2f} | "
            f"{' | '.join(times)} | {row['cached_tokens']:,} ({cached:.1%}) | "
            f"{row['peak_gb']:.1f} |"
        )
    ours, theirs = (next((r for r in rows if r["name"] == n), None) for n in ("ours", "mlx-lm"))
    if ours and theirs and theirs["turns"]:
        speed = ours["sessions_per_minute"] / theirs["sessions_per_minute"]
        print(f"ratio: sessions {speed:.2f}, median TTFT {theirs['ttft'] / ours['ttft']:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="256x2")
    parser.add_argument("--bits", help="of random weights: 4, 6, 8 or mxfp4")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--warm", type=int, default=1, help="sessions of two turns before those")
    parser.add_argument("--systems", default="ours,mlx-lm")
    parser.add_argument("--ours", default="", help="flags of our server")
    parser.add_argument("--trusted", action="store_true", help="ours without checks and timings")
    parser.add_argument(
        "--mlx-lm", help="flags of mlx-lm's server",
        default="--decode-concurrency 8 --prompt-concurrency 2 --prompt-cache-size 32 "
        "--prompt-cache-bytes 45GB",
    )  # fmt: skip
    parser.add_argument("--beside", type=Path, metavar="FILE", help="as bench/serving.py has it")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--seconds", type=float, default=200, help="for the sessions of a system")
    parser.add_argument("--deadline", type=float, default=590, help="then stacks and exit")
    args = parser.parse_args()
    args.alone = Alone(args.beside)
    deadline = threading.Timer(args.deadline, give_up)
    deadline.daemon = True
    deadline.start()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as args.scratch:
        folder = prepare(args, Path(args.scratch))
        from vllm_metal_lite.model.loader import load_tokenizer_only

        tokenizer = load_tokenizer_only(str(folder))
        job = make_job(tokenizer, args.sessions, args.turns, args.scale)
        # Other texts of the same sizes: shapes are met, and nothing is in a cache.
        warm = make_job(tokenizer, args.warm, 2, args.scale, seed=1)
        ours = [
            sys.executable,
            "-m", "tools.bench.lib.trusted_server" if args.trusted else "vllm_metal_lite",
            "serve", str(folder), "--port", "PORT",
            "--served-model-name", "m", "--max-num-seqs", str(args.sessions), *args.ours.split(),
        ]  # fmt: skip
        theirs = [
            sys.executable, "-m", "tools.bench.lib.mlx_lm_server",
            "--model", str(folder), "--port", "PORT", "--log-level", "WARNING",
            *args.mlx_lm.split(),
        ]  # fmt: skip
        for system in args.systems.split(","):
            command, model = (ours, "m") if system == "ours" else (theirs, str(folder))
            try:
                rows.append(run(system, command, model, warm, job, args))
            except (RuntimeError, subprocess.TimeoutExpired) as e:
                say(f"{system}: not measured: {e}")
                lines = (Path(args.scratch) / "log.txt").read_text().splitlines()
                errors = [line for line in lines if "rror" in line] or lines
                say("\n".join([*errors[:3], "...", *errors[-3:]]))
        report(args, rows)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1))
    return 0 if rows else 1


if __name__ == "__main__":
    run_main(main)
