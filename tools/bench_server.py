#!/usr/bin/env python3
"""Our HTTP server beside the embedded engine and other servers: same weights, same load.

    python tools/bench_server.py --model qwen3-0.6b           a GPU
    python tools/bench_server.py --model demo --scale 0.3     a CPU
    python tools/bench_server.py --model 512x4 --scale 0.3 --vllm .venv-vllm-0.33.0/bin/vllm

--model: "demo", or random weights: a key of SHAPES in serving_models.py, or HIDDENxLAYERS.
Load: 32 clients at once, prompts lognormal around 500 tokens, 40 to 220 tokens out; every turn has
prompts of its own, so no cache helps.  Each system runs in its own process, one after the other;
the first turn warms up.  Over HTTP: streamed /v1/completions, prompts as text.
Server CPU: user and system time of the HTTP process; of mlx-lm and vLLM, all of it in one process
is not comparable and left out.
/health: beside 64 streams and one prompt of 30,000 tokens (less, if the context is shorter).
"""

import argparse
import faulthandler
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from run_main import run_main

ROOT = Path(__file__).parent.parent
HERE = Path(__file__)
CLIENTS = 32


@dataclass(frozen=True)
class Turn:
    """Prompts as text and as token ids, and how many tokens to generate behind each."""

    texts: list[str]
    token_ids: list[list[int]]
    max_tokens: list[int]


def words_of(tokenizer: Any) -> list[int]:
    """Tokens whose text, one behind the other, is split into the same tokens again."""
    ids = [i for i in range(len(tokenizer)) if i < 2048]
    return [
        i for i in ids
        if (text := tokenizer.decode([i])).startswith(" ") and text[1:].isalpha()
        and tokenizer.encode(" a" + text + " a")[1:-1] == [i]
    ]  # fmt: skip


def make_turns(tokenizer: Any, count: int, scale: float, longest: int, turns: int) -> list[Turn]:
    rng, words = np.random.default_rng(0), words_of(tokenizer)
    made = []
    for _ in range(turns):
        sizes = np.clip(rng.lognormal(np.log(500), 0.8, count) * scale, 16, 0.6 * longest)
        ids = [rng.choice(words, int(n)).tolist() for n in sizes]
        limits = [max(int(n * scale), 8) for n in rng.integers(40, 221, count)]
        made.append(Turn([tokenizer.decode(one) for one in ids], ids, limits))
    return made


def body(model: str, text: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model, "prompt": text, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


# Systems


def embedded(folder: str, config: dict[str, Any]) -> None:
    """Reads turns from stdin, one a line; prints seconds and times to the first token."""
    from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams

    engine = LLMEngine.from_name(folder, EngineConfig(**config))
    print("ready", flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        started, firsts, tokens = time.perf_counter(), {}, 0
        for i, (ids, n) in enumerate(zip(turn["token_ids"], turn["max_tokens"], strict=True)):
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
            engine.add_request(str(i), ids, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                firsts.setdefault(output.request_id, time.perf_counter() - started)
                if output.finished:
                    tokens += len(output.outputs[0].token_ids)
        seconds = time.perf_counter() - started
        print(json.dumps([seconds, tokens, list(firsts.values())]), flush=True)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def server(command: list[str], port: int, seconds: float, log: Path) -> Iterator[int]:
    """A server that answers; yields its process's id."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            end = time.monotonic() + seconds
            while not answers(port):
                if process.poll() is not None or time.monotonic() > end:
                    tail = "\n".join(log.read_text().splitlines()[-15:])
                    raise RuntimeError(f"{command[1:4]} does not start:\n{tail}")
                time.sleep(0.2)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def answers(port: int) -> bool:
    for path in "/health", "/v1/models":
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2):
                return True
        except OSError:
            continue
    return False


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def clients(url: str, job: dict[str, Any], seconds: float) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE.parent / "server_client.py"), url],
        input=json.dumps(job), capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return json.loads(done.stdout)


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path, turns: list[Turn]) -> None:
        self.args, self.folder, self.turns = args, folder, turns
        self.config = {"max_num_seqs": CLIENTS, "max_model_len": args.max_model_len}
        self.rows: dict[str, dict[str, float]] = {}
        self.health: list[float] = []

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)

    def run_embedded(self) -> None:
        given = json.dumps({k: v for k, v in self.config.items() if v is not None})
        process = subprocess.Popen(
            [sys.executable, str(HERE), "--embedded", str(self.folder), given],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        speeds, firsts = [], []
        for number, turn in enumerate(self.turns):
            job = {"token_ids": turn.token_ids, "max_tokens": turn.max_tokens}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            seconds, tokens, first = json.loads(process.stdout.readline())
            self.say(f"embedded, turn {number}: {tokens / seconds:,.0f} tokens/s")
            if number:
                speeds.append(tokens / seconds)
                firsts.append(statistics.median(first))
        process.stdin.close()
        process.wait(30)
        self.rows["embedded engine"] = _row(speeds, firsts)

    def run_server(self, name: str, command: list[str], model: str, count_cpu: bool) -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [part.replace("PORT", str(port)) for part in command]
        with server(command, port, self.args.deadline, self.scratch / "log.txt") as pid:
            speeds, firsts, costs = [], [], []
            for number, turn in enumerate(self.turns):
                bodies = [
                    body(model, *one) for one in zip(turn.texts, turn.max_tokens, strict=True)
                ]
                before = cpu_seconds(pid)
                job = {"path": "/v1/completions", "bodies": bodies}
                done = clients(url, job, self.args.deadline)
                cpu, requests = cpu_seconds(pid) - before, done["requests"]
                tokens = sum(r["tokens"] for r in requests)
                seconds = max(r["end"] for r in requests)
                chunks = sum(r["chunks"] for r in requests)
                if tokens != sum(turn.max_tokens):
                    self.say(f"{name}: {tokens} tokens instead of {sum(turn.max_tokens)}")
                self.say(
                    f"{name}, turn {number}: {tokens / seconds:,.0f} tokens/s, {chunks} chunks, "
                    f"server {1e3 * cpu / tokens:.3f} ms a token, clients' CPU "
                    f"{done['client_cpu']:.2f} s of {seconds:.2f} s"
                )
                if number:
                    speeds.append(tokens / seconds)
                    firsts.append(statistics.median(r["first"] for r in requests))
                    costs.append(1e3 * cpu / tokens)
            self.rows[name] = _row(speeds, firsts)
            if count_cpu:
                self.rows[name]["cpu"] = statistics.median(costs)
                self.run_health(url, model)

    def run_health(self, url: str, model: str) -> None:
        """64 streams, and a long prompt among them."""
        turn, longest = self.turns[-1], int(0.9 * self.longest)
        streams = [(text, 200) for text in turn.texts] * 2
        long = " ".join(turn.texts)
        while len(long) < 8 * longest:
            long += long
        long_ids = self.tokenizer.encode(long)[: min(longest, 30_000)]
        self.say(f"/health beside 64 streams and a prompt of {len(long_ids):,} tokens")
        bodies = [body(model, text, n) for text, n in streams]
        bodies.append(body(model, self.tokenizer.decode(long_ids), 8))
        job = {"path": "/v1/completions", "bodies": bodies, "health": True}
        self.health = clients(url, job, self.args.deadline)["health"]

    tokenizer: Any
    longest: int
    scratch: Path

    def report(self) -> None:
        base = self.rows.get("embedded engine")
        print(f"Model: {self.args.model}; {CLIENTS} clients, {len(self.turns) - 1} counted turns")
        print("| system | output tokens/s | ratio | median TTFT, ms | server CPU, ms a token |")
        print("| --- | --- | --- | --- | --- |")
        for name, row in self.rows.items():
            ratio = f"{row['speed'] / base['speed']:.2f}" if base else ""
            cpu = f"{row['cpu']:.3f}" if "cpu" in row else ""
            print(f"| {name} | {row['speed']:,.0f} | {ratio} | {1e3 * row['ttft']:.0f} | {cpu} |")
        if self.health:
            worst = sorted(self.health)
            print(
                f"/health: {len(worst)} asked, median {1e3 * statistics.median(worst):.1f} ms, "
                f"99 % {1e3 * worst[int(0.99 * (len(worst) - 1))]:.1f} ms, "
                f"longest {1e3 * worst[-1]:.1f} ms"
            )


def _row(speeds: list[float], firsts: list[float]) -> dict[str, float]:
    return {"speed": statistics.median(speeds), "ttft": statistics.median(firsts)}


STARTED = time.perf_counter()


def main() -> int:
    if sys.argv[1:2] == ["--embedded"]:
        embedded(sys.argv[2], json.loads(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--scale", type=float, default=1.0, help="of prompt and answer lengths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--systems", default="embedded,ours,mlx-lm", help="in this order")
    parser.add_argument("--vllm", metavar="FILE", help="vLLM's command, with our plugin installed")
    parser.add_argument("--deadline", type=float, default=600, help="seconds; then stacks and exit")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.deadline, exit=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(args, Path(scratch))
        from vllm_metal_lite.model.loader import load_tokenizer_only

        tokenizer = load_tokenizer_only(str(folder))
        config = json.loads((folder / "config.json").read_text())
        longest = args.max_model_len or config["max_position_embeddings"]
        turns = make_turns(tokenizer, CLIENTS, args.scale, longest, args.repeats + 1)
        bench = Bench(args, folder, turns)
        bench.tokenizer, bench.longest, bench.scratch = tokenizer, longest, Path(scratch)
        limits = ["--max-model-len", str(args.max_model_len)] if args.max_model_len else []
        ours = [
            sys.executable, "-m", "vllm_metal_lite", "serve", str(folder), "--port", "PORT",
            "--served-model-name", "m", "--max-num-seqs", str(CLIENTS), *limits,
        ]  # fmt: skip
        theirs = [
            sys.executable, "-m", "mlx_lm", "server", "--model", str(folder), "--port", "PORT",
            "--decode-concurrency", str(CLIENTS), "--prompt-concurrency", "8",
            "--prompt-cache-size", "4", "--log-level", "WARNING",
        ]  # fmt: skip
        for system in args.systems.split(","):
            bench.say(f"{system} starts")
            try:
                if system == "embedded":
                    bench.run_embedded()
                elif system == "ours":
                    bench.run_server("our server", ours, "m", True)
                elif system == "mlx-lm":
                    bench.run_server("mlx_lm.server", theirs, str(folder), False)
            except (RuntimeError, subprocess.TimeoutExpired) as e:
                bench.say(f"{system}: not measured: {e}")
        if args.vllm:
            command = [
                args.vllm, "serve", str(folder), "--port", "PORT", "--served-model-name", "m",
                "--max-num-seqs", str(CLIENTS), *limits,
            ]  # fmt: skip
            bench.run_server("vLLM with our plugin", command, "m", False)
        bench.report()
    return 0


def prepare(args: argparse.Namespace, scratch: Path) -> Path:
    from serving_folder import write_model

    from vllm_metal_lite import backend
    from vllm_metal_lite.model.loader import DEMO_PATH

    if args.model == "demo":
        return DEMO_PATH
    (scratch / "model").mkdir()
    dtype = "float32" if backend.is_cpu() else "bfloat16"
    return write_model(args.model, scratch / "model", dtype, args.bits)


if __name__ == "__main__":
    run_main(main)
