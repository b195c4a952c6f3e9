#!/usr/bin/env python3
"""Minutes of mixed traffic against the real server: does its memory grow?

    python -m tools.prove.soak --minutes 20

Clients of all APIs come and go, streamed and not; some leave in mid-answer, some send nonsense.
Resident memory of the server and of the engine's process is read every 10 seconds.  The buffers
that MLX has freed and keeps are taken off the engine's: they grow with each size that MLX meets, up
to a limit of MLX's own, for longer than the soak.  Fails if a reply is wrong, if /status is not
clean at the end, or if memory grows: the median of the last quarter may be at most 3 % + 4 MiB
above that of the second quarter.  The first quarter warms up.  Prints a table.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.crowd import Crowd, get, questions, send, text_of, unclean, until
from tools.bench.lib.servers import free_port, ours, server
from tools.dev.run_main import parser_of, run_main

EVERY = 10  # seconds
ALLOWED_SHARE, ALLOWED_MIB = 0.03, 4


def rss_mib(pid: int) -> float:
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
    return int(done.stdout) / 1024


def num_fds(pid: int) -> int:
    """-1 where the system does not say."""
    folder = Path(f"/proc/{pid}/fd")
    return len(os.listdir(folder)) if folder.exists() else -1


class Soak:
    """rows: MiB of the server, of the engine, and of the buffers that MLX keeps there."""

    def __init__(self, url: str, pids: tuple[int, int], crowd: Crowd) -> None:
        self.url, self.pids, self.crowd = url, pids, crowd
        self.rows: list[tuple[float, float, float]] = []

    async def run(self, seconds: float, num_clients: int) -> None:
        started = time.monotonic()
        end = started + seconds

        async def client(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < end:
                await self.crowd.go(self.crowd.draw(rng, 3), 120)

        async def measure() -> None:
            while True:
                metrics = (await get(self.url, "/status"))["models"][0]["metrics"]
                kept = metrics["memory_cached_bytes"] / 2**20
                self._measure(time.monotonic() - started, kept)
                await asyncio.sleep(EVERY)

        measuring = asyncio.ensure_future(measure())
        await asyncio.gather(*map(client, range(num_clients)))
        measuring.cancel()

    def _measure(self, now: float, kept: float) -> None:
        server, engine = self.pids
        row = rss_mib(server), rss_mib(engine), kept
        self.rows.append(row)
        files = f"{num_fds(server)} and {num_fds(engine)} files"
        print(
            f"[{now:5.0f} s] {self.crowd.counts.total():6,} visits, server {row[0]:.1f} MiB, "
            f"engine {row[1]:.1f}, {row[2]:.1f} kept by MLX, {files}, "
            f"{len(self.crowd.faults)} faults",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def growth(self) -> list[str]:
        """What has grown."""
        quarter = max(len(self.rows) // 4, 1)
        grown = []
        print("| process | MiB, second quarter | MiB, last quarter | limit |")
        print("| --- | --- | --- | --- |")
        server = [row[0] for row in self.rows]
        engine = [row[1] - row[2] for row in self.rows]
        for name, mib in (("server", server), ("engine, but for kept buffers", engine)):
            before = statistics.median(mib[quarter : 2 * quarter])
            after = statistics.median(mib[-quarter:])
            limit = before * (1 + ALLOWED_SHARE) + ALLOWED_MIB
            print(f"| {name} | {before:.1f} | {after:.1f} | {limit:.1f} |")
            if after > limit:
                grown.append(f"{name}: {before:.1f} MiB became {after:.1f}, limit {limit:.1f}")
        return grown


async def prepare(url: str, count: int) -> Crowd:
    """A crowd that knows the answers: each question is asked once, alone."""
    asked = questions(count)
    crowd = Crowd(url, asked, [], [])
    for question in asked:
        body = {"messages": question.messages, "max_tokens": question.max_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        path = "/v1/chat/completions"
        reply = await send(url, "POST", path, json.dumps(body).encode())
        assert reply is not None
        crowd.answers.append(text_of(path, reply.body))
        tokens = await send(url, "POST", "/tokenize", json.dumps(body).encode())
        assert tokens is not None
        crowd.token_ids.append(json.loads(tokens.body)["tokens"])
    return crowd


async def soak(url: str, pid: int, args: argparse.Namespace) -> int:
    crowd = await prepare(url, 24)
    status = await get(url, "/status")
    running = Soak(url, (pid, status["models"][0]["pid"]), crowd)
    await running.run(60 * args.minutes, args.clients)
    wrong = crowd.faults[:20]
    if left := await until(lambda: unclean(url), 30):
        wrong.append(f"/status still shows {left}")
    metrics = (await get(url, "/status"))["models"][0]["metrics"]
    print(f"{dict(crowd.counts)}; {metrics['preemptions']:,} preemptions")
    wrong += running.growth()
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=24)
    args = parser.parse_args()
    port = free_port()
    command = ours("demo", "--num-blocks", "36", "--max-num-seqs", "12", "--max-model-len", "512")
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.txt"
        with server(command, port, 120, log) as pid:
            result = asyncio.run(soak(f"http://127.0.0.1:{port}", pid, args))
        if "Traceback" in log.read_text():
            print(f"the server's log has a trace:\n{log.read_text()[-2000:]}")
            result = 1
    return result


if __name__ == "__main__":
    run_main(main)
