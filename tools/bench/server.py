#!/usr/bin/env python3
"""Our HTTP server beside the embedded engine and other servers: same weights, same load.

    python -m tools.bench.server --model qwen3-0.6b           a GPU
    python -m tools.bench.server --model demo --scale 0.3     a CPU
    python -m tools.bench.server --model 512x4 --scale 0.3 --vllm .venv-vllm-0.33.0/bin/vllm

--model: "demo", or random weights: a key of SHAPES in bench/lib/configs.py, or HIDDENxLAYERS.
Loads: "mixed", 32 clients, each sends 2 requests, one behind the other; prompts lognormal around
500 tokens, 40 to 220 tokens out.  "decodes", 32 clients, 32 tokens in, 512 out: the most tokens a
second that there can be, so the most work for the server.  Every turn has prompts of its own, so no
cache helps.  Each system runs in its own process, one after the other; the first two turns warm up.
Over HTTP: streamed /v1/completions, prompts as text; with --chat /v1/chat/completions.
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
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.dev.run_main import run_main

ROOT = Path(__file__).resolve().parents[2]
CLIENTS, PER_CLIENT, WARM_UPS = 32, 2, 2
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Turn:
    """Prompts as text and as token ids, and how many tokens to generate behind each.

    Client number i sends i, i + CLIENTS, ..., each when the one before has its answer.
    """

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


def make_turns(tokenizer: Any, scale: float, longest: int, turns: int) -> dict[str, list[Turn]]:
    """By the name of the load."""
    rng, words = np.random.default_rng(0), words_of(tokenizer)

    def turn(sizes: Any, limits: Any) -> Turn:
        ids = [rng.choice(words, int(n)).tolist() for n in sizes]
        return Turn([tokenizer.decode(one) for one in ids], ids, [int(n) for n in limits])

    made: dict[str, list[Turn]] = {"mixed": [], "decodes": []}
    for _ in range(turns):
        count = CLIENTS * PER_CLIENT
        sizes = np.clip(rng.lognormal(np.log(500), 0.8, count) * scale, 16, 0.6 * longest)
        limits = np.maximum(rng.integers(40, 221, count) * scale, 8)
        made["mixed"].append(turn(sizes, limits))
        limit = max(int(512 * scale), 8)
        made["decodes"].append(turn([32] * CLIENTS, [limit] * CLIENTS))
    return made


def body(path: str, model: str, text: str, max_tokens: int) -> dict[str, Any]:
    prompt = {"prompt": text}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": text}]}
    return {
        "model": model, **prompt, "max_tokens": max_tokens, "temperature": 0,
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
        ids, limits = turn["token_ids"], turn["max_tokens"]
        started, arrived, firsts = time.perf_counter(), {}, {}

        def add(i: int, ids: Any = ids, limits: Any = limits, arrived: Any = arrived) -> None:
            params = SamplingParams(temperature=0, max_tokens=limits[i], ignore_eos=True)
            arrived[str(i)] = time.perf_counter()
            engine.add_request(str(i), ids[i], params)

        for i in range(CLIENTS):
            add(i)
        while engine.has_unfinished_requests():
            for output in engine.step():
                name = output.request_id
                firsts.setdefault(name, time.perf_counter() - arrived[name])
                if output.finished and int(name) + CLIENTS < len(ids):
                    add(int(name) + CLIENTS)
        seconds = time.perf_counter() - started
        print(json.dumps([seconds, sum(limits), list(firsts.values())]), flush=True)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def server(command: list[str], port: int, seconds: float, log: Path) -> Iterator[int]:
    """A server that answers; yields its process's id."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
        RUNNING.append(process)
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
        [sys.executable, "-m", "tools.bench.lib.server_client", url],
        input=json.dumps(job), capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return json.loads(done.stdout)


class Bench:
    def __init__(
        self, args: argparse.Namespace, folder: Path, turns: dict[str, list[Turn]]
    ) -> None:
        self.args, self.folder, self.turns = args, folder, turns
        self.path = CHAT if args.chat else "/v1/completions"
        self.config = {"max_num_seqs": CLIENTS, "max_model_len": args.max_model_len}
        self.rows: dict[str, dict[str, dict[str, float]]] = {load: {} for load in turns}
        self.health: list[float] = []

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)

    def run_embedded(self) -> None:
        given = json.dumps({k: v for k, v in self.config.items() if v is not None})
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.server", "--embedded", str(self.folder), given],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        RUNNING.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for load, turns in self.turns.items():
            speeds, firsts = [], []
            for number, turn in enumerate(turns):
                job = {"token_ids": turn.token_ids, "max_tokens": turn.max_tokens}
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
                seconds, tokens, first = json.loads(process.stdout.readline())
                self.say(f"embedded, {load}, turn {number}: {tokens / seconds:,.0f} tokens/s")
                if number >= WARM_UPS:
                    speeds.append(tokens / seconds)
                    firsts.append(statistics.median(first))
            self.rows[load]["embedded engine"] = _row(speeds, firsts)
        process.stdin.close()
        process.wait(30)

    def run_server(self, name: str, command: list[str], model: str, count_cpu: bool) -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [part.replace("PORT", str(port)) for part in command]
        with server(command, port, self.args.deadline, self.scratch / "log.txt") as pid:
            for load, turns in self.turns.items():
                speeds, firsts, costs = [], [], []
                for number, turn in enumerate(turns):
                    speed, first, cost = self.run_turn(
                        f"{name}, {load}, {number}", turn, url, model, pid
                    )
                    if number >= WARM_UPS:
                        speeds.append(speed)
                        firsts.append(first)
                        costs.append(cost)
                self.rows[load][name] = _row(speeds, firsts)
                if count_cpu:
                    self.rows[load][name]["cpu"] = statistics.median(costs)
            if count_cpu:
                self.run_health(url, model)

    def run_turn(
        self, label: str, turn: Turn, url: str, model: str, pid: int
    ) -> tuple[float, float, float]:
        """(tokens/s, median seconds to the first token, milliseconds of the server a token)."""
        asked = zip(turn.texts, turn.max_tokens, strict=True)
        bodies = [body(self.path, model, *one) for one in asked]
        clients_bodies = [bodies[i::CLIENTS] for i in range(CLIENTS)]
        before = cpu_seconds(pid)
        job = {"path": self.path, "clients": clients_bodies}
        done = clients(url, job, self.args.deadline)
        cpu, requests = cpu_seconds(pid) - before, done["requests"]
        tokens = sum(r["tokens"] for r in requests)
        seconds = max(r["end"] for r in requests)
        chunks = sum(r["chunks"] for r in requests)
        if tokens != sum(turn.max_tokens):
            self.say(f"{label}: {tokens} tokens instead of {sum(turn.max_tokens)}")
        self.say(
            f"{label}: {tokens / seconds:,.0f} tokens/s, {chunks} chunks, "
            f"server {1e3 * cpu / tokens:.3f} ms a token, clients' CPU "
            f"{done['client_cpu']:.2f} s of {seconds:.2f} s"
        )
        return tokens / seconds, statistics.median(r["first"] for r in requests), 1e3 * cpu / tokens

    def run_health(self, url: str, model: str) -> None:
        """64 streams, and a long prompt among them."""
        turn, longest = self.turns["mixed"][-1], int(0.9 * self.longest)
        streams = [(text, 200) for text in turn.texts[:64]]
        long = " ".join(turn.texts)
        while len(long) < 8 * longest:
            long += long
        long_ids = self.tokenizer.encode(long)[: min(longest, 30_000)]
        self.say(f"/health beside 64 streams and a prompt of {len(long_ids):,} tokens")
        streams.append((self.tokenizer.decode(long_ids), 8))
        bodies = [[body(self.path, model, *one)] for one in streams]
        job = {"path": self.path, "clients": bodies, "health": True}
        self.health = clients(url, job, self.args.deadline)["health"]

    tokenizer: Any
    longest: int
    scratch: Path

    def report(self) -> None:
        print(f"Model: {self.args.model}; {CLIENTS} clients, {self.args.repeats} counted turns")
        print(
            "| load | system | output tokens/s | ratio | median TTFT, ms | server CPU, ms a token |"
        )
        print("| --- | --- | --- | --- | --- | --- |")
        for load, rows in self.rows.items():
            base = rows.get("embedded engine")
            for name, row in rows.items():
                ratio = f"{row['speed'] / base['speed']:.2f}" if base else ""
                cpu = f"{row['cpu']:.3f}" if "cpu" in row else ""
                ttft = f"{1e3 * row['ttft']:.0f}"
                print(f"| {load} | {name} | {row['speed']:,.0f} | {ratio} | {ttft} | {cpu} |")
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
RUNNING: list[subprocess.Popen[Any]] = []  # ended at the deadline


def give_up() -> None:
    """The deadline: print all stacks, and leave nothing behind."""
    faulthandler.dump_traceback()
    for process in RUNNING:
        process.kill()
    os._exit(1)


def main() -> int:
    if sys.argv[1:2] == ["--embedded"]:
        embedded(sys.argv[2], json.loads(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bits", help="of random weights: 4, 6, 8 or mxfp4")
    parser.add_argument("--scale", type=float, default=1.0, help="of prompt and answer lengths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--systems", default="embedded,ours,mlx-lm", help="in this order")
    parser.add_argument("--vllm", metavar="FILE", help="vLLM's command, with our plugin installed")
    parser.add_argument("--deadline", type=float, default=600, help="seconds; then stacks and exit")
    args = parser.parse_args()
    deadline = threading.Timer(args.deadline, give_up)
    deadline.daemon = True
    deadline.start()
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(args, Path(scratch))
        from vllm_metal_lite.model.loader import load_tokenizer_only

        tokenizer = load_tokenizer_only(str(folder))
        config = json.loads((folder / "config.json").read_text())
        longest = args.max_model_len or config["max_position_embeddings"]
        turns = make_turns(tokenizer, args.scale, longest, args.repeats + WARM_UPS)
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
    from tools.bench.lib.folder import write_model
    from vllm_metal_lite import backend
    from vllm_metal_lite.model.files import DEMO_PATH

    if args.model == "demo":
        return DEMO_PATH
    (scratch / "model").mkdir()
    dtype = "float32" if backend.is_cpu() else "bfloat16"
    return write_model(args.model, scratch / "model", dtype, args.bits)


if __name__ == "__main__":
    run_main(main)
