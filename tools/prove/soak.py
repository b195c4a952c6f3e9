"""Runs minutes of mixed traffic against the real server, and fails if its memory grows.

    python -m tools.prove.soak --minutes 20

Clients use all APIs, streamed and not; a third leave during the answer, some send nonsense, and
some get 503 because too many wait.  Beside them run readers that pause, headers that arrive byte
by byte, two further models with room for one of them, and a model with truncated weights.  Every 10
seconds the tool reads the resident memory of the server and of the first model's process.  It
subtracts the freed buffers that MLX keeps: these grow with each new size, up to MLX's own limit,
for longer than the soak.  The tool fails if a reply is wrong, if /status is not clean at the end,
or if memory or open files grow.  The median memory of the last quarter may be at most 3 % + 4 MiB
above that of the second quarter (the first quarter warms up).  After the last client, at most 4
more files may be open than before the first one.  Prints a table.
"""

import argparse
import asyncio
import json
import random
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.server.crowd import (
    Crowd,
    Question,
    Reply,
    Visit,
    get,
    questions,
    send,
    text_of,
    unclean,
    until,
)
from tools.lib.frame import above_zero, at_least, parser_of, print_table, run_main, say
from tools.lib.processes import num_fds, rss_mib
from tools.lib.servers import has_trace, ours, server
from vllm_metal_lite.model.files.find import find

EVERY = 10  # seconds
ALLOWED_SHARE, ALLOWED_MIB, ALLOWED_FILES = 0.03, 4, 4
PATIENCE = 240  # seconds until a reply counts as lost
CHAT, BUSY = "/v1/chat/completions", b"and max_waiting"


class Patient(Crowd):
    """A crowd that tries again after a 503."""

    def _judge(self, visit: Visit, number: int, reply: Reply) -> None:
        if reply.status == 503 and BUSY in reply.body:
            self.counts["told to come again"] += 1
        else:
            super()._judge(visit, number, reply)

    def check(self, kind: str, is_right: bool, what: object) -> None:
        self.counts[kind] += 1
        if not is_right:
            self.faults.append(f"{kind}: {what!r}")

    async def ask_models(self, rng: random.Random) -> None:
        """Ask each of the other models one question."""
        for model in "twin", "third", "broken":
            number = rng.randrange(len(self.asked))
            body = {**question_body(self.asked[number]), "model": model}
            reply = await send(self.url, "POST", CHAT, json.dumps(body).encode())
            assert reply is not None
            if model == "broken":
                self.check(model, b"model_not_loaded" in reply.body, reply)
            elif reply.status != 200:
                self.check(model, BUSY in reply.body, reply)
            else:
                self.check(model, text_of(CHAT, reply.body) == self.answers[number], reply)

    async def read_late(self, rng: random.Random) -> None:
        """Read a long stream after a pause."""
        body = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True}
        body |= {"stream": True, "logprobs": 20}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(data)}\r\n"
        said = await self._late(head.encode() + b"Connection: close\r\n", data, rng.uniform(5, 30))
        self.check("slow reader", b"[DONE]" in said or BUSY in said, said[-200:])

    async def drip(self, rng: random.Random) -> None:
        """Send headers that never end."""
        said = await self._late(b"POST /v1/completions HTTP/1.1\r\nX-Slow: ", None, 1)
        self.check("slow head", not said, said)

    async def _late(self, head: bytes, data: bytes | None, seconds: float) -> bytes:
        """The reply to a client that reads after a pause; without data it sends nothing more."""
        parts = urlsplit(self.url)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((parts.hostname, parts.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
        try:
            if data is not None:
                head += f"Host: {parts.netloc}\r\n\r\n".encode() + data
            writer.write(head)
            await asyncio.sleep(seconds)
            return await reader.read()
        finally:
            writer.close()


def question_body(question: Question) -> dict[str, Any]:
    body = {"messages": question.messages, "max_tokens": question.max_tokens}
    return {**body, "temperature": 0, "ignore_eos": True}


class Soak:
    def __init__(self, url: str, pids: tuple[int, int], crowd: Patient) -> None:
        self.url, self.pids, self.crowd = url, pids, crowd
        self.mib: list[tuple[float, float]] = []  # memory of the server and of the engine

    async def run(self, seconds: float, num_clients: int) -> None:
        end = time.monotonic() + seconds

        async def client(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < end:
                await self.crowd.go(self.crowd.draw(rng, 3), PATIENCE)
                await asyncio.sleep(rng.random())

        async def side_load(visit: Callable[[random.Random], Awaitable[None]]) -> None:
            rng = random.Random(visit.__name__)
            while time.monotonic() < end:
                try:
                    async with asyncio.timeout(PATIENCE):
                        await visit(rng)
                except Exception as e:
                    self.crowd.check(visit.__name__, False, e)
                await asyncio.sleep(rng.uniform(0, 20))

        async def measure() -> None:
            while time.monotonic() < end:
                await self._measure()
                await asyncio.sleep(EVERY)

        crowd = self.crowd
        side_loads = map(side_load, (crowd.ask_models, crowd.read_late, crowd.drip))
        await asyncio.gather(measure(), *map(client, range(num_clients)), *side_loads)

    async def _measure(self) -> None:
        metrics = (await get(self.url, "/status"))["models"][0]["metrics"]
        kept = metrics["memory_cached_bytes"] / 2**20
        server, engine = (rss_mib(pid) or 0.0 for pid in self.pids)
        self.mib.append((server, engine - kept))
        say(
            f"{self.crowd.counts.total():6,} visits, server {server:.1f} MiB, engine "
            f"{engine - kept:.1f} and {kept:.1f} kept by MLX, {len(self.crowd.faults)} faults"
        )

    def rows(self, opened: list[int], left: list[int]) -> Iterator[tuple[str, ...]]:
        """Memory in the second and the last quarter; open files at the start and at the end."""
        quarter = max(len(self.mib) // 4, 1)
        names = "MiB of the server", "MiB of the engine without kept buffers"
        for name, mib in zip(names, zip(*self.mib, strict=True), strict=True):
            before = statistics.median(mib[quarter : 2 * quarter] or mib)
            limit = before * (1 + ALLOWED_SHARE) + ALLOWED_MIB
            yield _row(name, before, statistics.median(mib[-quarter:]), limit)
        names = "open files of the server", "open files of the engine"
        for name, first, last in zip(names, opened, left, strict=True):
            yield _row(name, first, last, first + ALLOWED_FILES)


def _row(name: str, before: float, after: float, limit: float) -> tuple[str, ...]:
    numbers = (f"{number:.1f}" for number in (before, after, limit))
    return name, *numbers, "" if after <= limit else "grew"


async def prepare(url: str, count: int) -> Patient:
    """Make a crowd that knows the answers: each question was asked once, alone."""
    asked = questions(count)
    crowd = Patient(url, asked, [], [])
    for question in asked:
        body = question_body(question)
        reply = await send(url, "POST", CHAT, json.dumps(body).encode())
        assert reply is not None
        crowd.answers.append(text_of(CHAT, reply.body))
        tokens = await send(url, "POST", "/tokenize", json.dumps(body).encode())
        assert tokens is not None
        crowd.token_ids.append(json.loads(tokens.body)["tokens"])
    return crowd


async def soak(url: str, pid: int, args: argparse.Namespace) -> int:
    crowd = await prepare(url, 24)
    status = await get(url, "/status")
    running = Soak(url, (pid, status["models"][0]["pid"]), crowd)
    files = [num_fds(pid) for pid in running.pids]
    await running.run(60 * args.minutes, args.clients)
    wrong = crowd.faults[:20]
    if left := await until(lambda: unclean(url), 30):
        wrong.append(f"/status still shows {left}")
    metrics = (await get(url, "/status"))["models"][0]["metrics"]
    print(f"{dict(crowd.counts)}; {metrics['preemptions']:,} preemptions")
    rows = running.rows(files, [num_fds(pid) for pid in running.pids])
    table = print_table(("", "before", "after", "limit", "fault"), rows)
    wrong += [f"{name} grew" for name, *_, fault in table if fault]
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


def cut(folder: Path) -> str:
    """Make a copy of the demo model with truncated weights."""
    shutil.copytree(find("demo"), folder)
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:100_000])
    return str(folder)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=above_zero, default=20)
    parser.add_argument("--clients", type=at_least(1, 10_000), default=24)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        broken = f"broken={cut(Path(scratch) / 'broken')}"
        models = ["--model", "twin=demo", "--model", "third=demo", "--model", broken]
        limits = "--pin demo --memory-budget-gib 2.3 --num-blocks 36 --max-num-seqs 12"
        limits += " --max-model-len 512 --max-waiting 11"
        log = Path(scratch) / "log.txt"
        with server(ours("demo", *models, *limits.split()), log) as (url, pid):
            result = asyncio.run(soak(url, pid, args))
        return 1 if has_trace(log) else result


if __name__ == "__main__":
    run_main(main)
