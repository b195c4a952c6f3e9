"""Measures this HTTP server beside others: same weights, same load.

    python -m tools.bench.server --model qwen3-0.6b                   a GPU
    python -m tools.bench.server --scale 0.3                          a CPU, the demo model
    python -m tools.bench.server --load output --scale 0.01 --repeats 1 --systems ours    seconds
    python -m tools.bench.server --model qwen3-4b --load sessions
    python -m tools.bench.server --model 512x4 --systems ours vllm --vllm .venv-vllm-0.33.0/bin/vllm

--model: "demo", or random weights: a key of bench/lib/shapes.json, or HIDDENxLAYERS.  Loads:

- clients: 32 clients, each sends 2 requests, one after the other; prompts lognormal around 500
  tokens, 40 to 220 tokens out.
- output: 32 clients, 32 tokens in, 512 out: the highest output rate.
- sessions: each starts with 25,000 tokens, 20,000 of them common to all (system prompt and
  tools); 12 turns, each with 200 to 2,000 new tokens (lognormal) and 150 out.  Recorded answers go
  into the next prompt, so all servers see the same prompts.  For a system that needs longer than
  --seconds, the finished turns are reported.

Every run has its own prompts, so a cache helps only within sessions.  The systems run one after the
other, each in its own process.  Two runs warm up (sessions: --warm sessions of two turns).  Prompts
are text, over streamed /v1/completions; sessions use /v1/chat/completions.  CPU: user and system
time of this server's HTTP process; other servers also compute in theirs.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.lib.metrics import pace
from tools.bench.lib.models import BITS, write_model
from tools.bench.lib.tables import print_medians
from tools.lib.clients import Clients, LoadRun, send
from tools.lib.frame import above_zero, at_least, parser_of, run_main, say
from tools.lib.processes import cpu_seconds, sampled_memory
from tools.lib.servers import mlx_lm, ours, server
from tools.lib.trust import add_trusted
from vllm_metal_lite.benchmark import Metrics, gaps, median_of
from vllm_metal_lite.errors import MetalLiteError
from vllm_metal_lite.model.files.tokenizer import load_tokenizer_only

CLIENTS, WARM_UPS = 32, 2
# Tokens of a session: its first prompt, the part of it that all sessions share, each answer.
START, SHARED, OUT = 25_000, 20_000, 150


class Prompts:
    """Draws the loads."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.args, self.rng = args, np.random.default_rng(0)
        self.tokenizer = load_tokenizer_only(str(folder))
        config = json.loads((folder / "config.json").read_text())
        self.longest = args.max_model_len or config["max_position_embeddings"]
        # Tokens whose joined text is split into the same tokens again.
        self.words = [
            i
            for i in range(min(len(self.tokenizer), 2048))
            if (text := self.tokenizer.decode([i])).startswith(" ")
            and text[1:].isalpha()
            and self.tokenizer.encode(" a" + text + " a")[1:-1] == [i]
        ]

    def text(self, num_tokens: float) -> str:
        ids = self.rng.choice(self.words, max(int(num_tokens), 4)).tolist()
        text: str = self.tokenizer.decode(ids)
        return text

    def body(self, num_tokens: float, max_tokens: float) -> dict[str, Any]:
        return {"prompt": self.text(num_tokens), "max_tokens": max(int(max_tokens), 4)}

    def clients(self) -> Clients:
        count, scale = 2 * CLIENTS, self.args.scale
        sizes = self.rng.lognormal(np.log(500), 0.8, count) * scale
        limits = self.rng.integers(40, 221, count) * scale
        pairs = zip(np.clip(sizes, 16, 0.6 * self.longest), limits, strict=True)
        bodies = [self.body(*pair) for pair in pairs]
        return [bodies[i::CLIENTS] for i in range(CLIENTS)]

    def output(self) -> Clients:
        return [[self.body(32, 512 * self.args.scale)] for _ in range(CLIENTS)]

    def sessions(self, count: int, turns: int) -> Clients:
        scale = self.args.scale
        system = {"role": "system", "content": self.text(SHARED * scale)}

        def session() -> list[dict[str, Any]]:
            new = np.clip(self.rng.lognormal(np.log(600), 0.7, turns), 200, 2000)
            new[0] = START - SHARED
            messages, bodies = [system], []
            for size in new:
                messages.append({"role": "user", "content": self.text(size * scale)})
                bodies.append({"messages": [*messages], "max_tokens": max(int(OUT * scale), 4)})
                messages.append({"role": "assistant", "content": self.text(OUT * scale)})
            return bodies

        return [session() for _ in range(count)]

    def runs(self, load: str) -> tuple[list[Clients], list[Clients]]:
        """The runs of a load: warm-ups, and counted ones."""
        args = self.args
        if load == "sessions":
            return [self.sessions(args.warm, 2)], [self.sessions(args.sessions, args.turns)]
        draw: Callable[[], Clients] = getattr(self, load)
        return [draw() for _ in range(WARM_UPS)], [draw() for _ in range(args.repeats)]


def measure(run: LoadRun, turns: int, server_cpu: float) -> Metrics:
    """The metrics of a run.

    turns: the turns of a session.  server_cpu: CPU seconds of the server; 0 if unknown.
    """
    ended = [r for r in run.requests if r.usage is not None and r.chunks]
    if not ended:
        raise MetalLiteError(f"no request ended within {run.seconds:.0f} s")
    tokens = sum(r.usage.get("completion_tokens", 0) for r in ended)
    prompt = sum(r.usage.get("prompt_tokens", 0) for r in ended)
    between = [gap for r in ended for gap in gaps(r.chunks)]
    values = {"done": len(ended), **pace(tokens, run.seconds, [r.first for r in ended], between)}
    if turns > 1:
        values["sessions_per_minute"] = 60 * len(ended) / turns / run.seconds
    if later := [r.first for r in ended if r.turn]:
        values["later_ttft_median"] = statistics.median(later)
    if prompt:
        values["cached_prompt_share"] = sum(r.cached for r in ended) / prompt
    if server_cpu:
        values["server_cpu_per_token"] = server_cpu / tokens
    return values


class Bench:
    """Runs all loads on one system after the other.  medians: by load and system."""

    def __init__(self, args: argparse.Namespace, folder: Path, scratch: Path) -> None:
        self.args, self.log, prompts = args, scratch / "log", Prompts(folder, args)
        self.runs = {load: prompts.runs(load) for load in args.load}
        self.medians: dict[str, dict[str, Metrics]] = {load: {} for load in args.load}

    def run(self, name: str, command: list[str], model: str) -> None:
        with server(command, self.log) as (url, pid), sampled_memory(pid) as peak_gb:
            for load, (warm, counted) in self.runs.items():
                turns, found = len(counted[0][0]) if load == "sessions" else 1, []
                for i, clients in enumerate([*warm, *counted]):
                    run, before = LoadRun(), cpu_seconds(pid)
                    asyncio.run(send(url, model, clients, run, self.args.seconds))
                    cpu = cpu_seconds(pid) - before if name == "ours" else 0
                    if i >= len(warm):
                        found.append(measure(run, turns, cpu))
                        say(f"{name}, {load}: {found[-1]['output_tokens_per_s']:,.0f} tokens/s")
                self.medians[load][name] = {**median_of(found), "server_gb": peak_gb()}

    def report(self) -> None:
        print(f"Model: {self.args.model}, scale {self.args.scale}; medians of counted runs")
        for load, medians in self.medians.items():
            if medians:
                print(f"\n### {load}: {sum(map(len, self.runs[load][1][0]))} requests\n")
                print_medians(medians)


def commands_of(args: argparse.Namespace, folder: Path) -> dict[str, tuple[list[str], str]]:
    """The command of each system, and the name by which it serves the model."""
    seats = str(args.sessions if args.load == ["sessions"] else CLIENTS)
    flags = ["--served-model-name", "m", "--max-num-seqs", seats]
    if args.max_model_len:
        flags += ["--max-model-len", str(args.max_model_len)]
    theirs = "--decode-concurrency 32 --prompt-concurrency 8 --prompt-cache-size 4"
    if "sessions" in args.load:
        theirs = "--decode-concurrency 8 --prompt-concurrency 2 --prompt-cache-size 32 "
        theirs += "--prompt-cache-bytes 45GB"
    return {
        "ours": (ours(folder, *flags, *args.ours.split(), trusted=args.trusted), "m"),
        "mlx-lm": (mlx_lm(folder, *theirs.split()), str(folder)),
        "vllm": ([args.vllm, "serve", str(folder), "--port", "PORT", *flags], "m"),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bits", choices=BITS, help="of random weights")
    loads = ("clients", "output", "sessions")
    parser.add_argument("--load", nargs="+", choices=loads, default=list(loads[:2]))
    parser.add_argument("--scale", type=above_zero, default=1.0, help="of all lengths")
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--max-model-len", type=at_least(1))
    systems = ("ours", "mlx-lm", "vllm")
    parser.add_argument("--systems", nargs="+", choices=systems, default=list(systems[:2]))
    parser.add_argument("--vllm", metavar="FILE", help="vLLM's command, with our plugin installed")
    parser.add_argument("--sessions", type=at_least(1), default=16, help="their number")
    parser.add_argument("--turns", type=at_least(1), default=12, help="of a session")
    parser.add_argument("--warm", type=at_least(1), default=1, help="sessions that warm up")
    parser.add_argument("--ours", default="", help="flags of our server")
    add_trusted(parser)
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--seconds", type=above_zero, default=200, help="time limit of a run")
    args = parser.parse_args()
    if "vllm" in args.systems and not shutil.which(args.vllm or ""):
        parser.error(f"--systems vllm needs --vllm with vLLM's command, not {args.vllm!r}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(args.model, Path(scratch) / "model", args.bits)
        bench = Bench(args, folder, Path(scratch))
        commands = commands_of(args, folder)
        for system in args.systems:
            say(f"{system} starts")
            try:
                bench.run(system, *commands[system])
            except MetalLiteError as e:
                say(f"{system}: not measured: {e}")
        bench.report()
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "loads": bench.medians}, indent=1))
    return 0 if any(bench.medians.values()) else 1


if __name__ == "__main__":
    run_main(main)
