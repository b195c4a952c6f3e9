"""Sends expensive and malformed requests beside one steady stream, and measures the harm to others.

    python -m tools.prove.hostile                        all cases, the demo model
    python -m tools.prove.hostile --only 'tools' --only 'text'    cases whose names hold these

Prints for each case: status, seconds, the longest gap of the steady stream, the same beside a plain
prompt of as many tokens, the slowest /health, memory of both processes half a second later, and the
requests that the server or the engine still runs two seconds later.  Some clients leave after two
seconds.  All cases run twice.  SIGTERM comes at the end, while the last case runs.  A case fails if
the gap exceeds the plain one by more than 0.5 s, if /health takes more than 250 ms, or if a request
is left.  In the second round it also fails if memory stays more than 50 MB above the end of the
first.  The machine must be idle: everything here is time.
"""

import asyncio
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import httpx

from tools.lib.clients import LoadRun, send
from tools.lib.frame import parser_of, print_table, run_main, say
from tools.lib.processes import rss_mib
from tools.lib.servers import has_trace, ours, server
from vllm_metal_lite import MetalLiteError
from vllm_metal_lite.errors import one_line

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
# What is allowed: seconds of the gap above the plain one; seconds of /health (parsing 30 MB of JSON
# holds the interpreter's lock for 0.1 s); MB of memory above the first round.
GAP, HEALTH, MEMORY = 0.5, 0.25, 50
# Seconds: until a client leaves, until no request may be left, and `--drain`.
LEAVES, LEFT, DRAIN = 2.0, 2.0, 5
HEADS = ("case", "reply", "s", "gap, s", "beside a plain prompt", "/health, ms")
HEADS += ("MiB of the server", "of the engine", "faults")
TOOL = {
    "description": "x" * 100,
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}


@dataclass
class Case:
    """A request.  leaves: whether its client leaves early.  tokens: tokens of its prompt."""

    name: str
    path: str
    body: Any
    leaves: bool = False
    tokens: int = 20

    @property
    def raw(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HI, "max_tokens": 5, **fields}


def form(**fields: Any) -> dict[str, Any]:
    return chat(max_tokens=20, structured_outputs=fields)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}", **TOOL}} for i in range(count)]


def said(text: str) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": text}])


def cases() -> Iterator[Case]:
    yield Case("control", CHAT, chat())
    yield Case("regex nested repetition", CHAT, form(regex="((a{1,100}){1,100}){1,100}"))
    yield Case("regex a{100000}", CHAT, form(regex="a{100000}"))
    alternatives = "|".join("a" * i + ".*b" for i in range(400))
    yield Case("regex alternatives", CHAT, form(regex=f"({alternatives})"))
    yield Case("regex .*a.{30}b.{30}", CHAT, form(regex=".*a.{30}b.{30}"))
    yield Case("schema nested 200", CHAT, form(json=nested(200)))
    refs: dict[str, Any] = {"$defs": {"d40": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    for i in range(40):
        both = {"$ref": f"#/$defs/d{i + 1}"}
        pair = {"a": both, "b": both}
        refs["$defs"][f"d{i}"] = {"type": "object", "properties": pair, "required": ["a", "b"]}
    yield Case("schema refs 2^40", CHAT, form(json=refs))
    yield Case("schema minLength 1e6", CHAT, form(json={"type": "string", "minLength": 10**6}))
    yield Case("schema enum 15000", CHAT, form(json={"enum": [f"value{i}" for i in range(15000)]}))
    keys = [{"type": "object", "properties": {"k": {"const": f"v{i}"}}} for i in range(2000)]
    yield Case("schema anyOf 2000", CHAT, form(json={"anyOf": keys}))
    yield Case("choice 10000", CHAT, form(choice=[f"x{i}" for i in range(10000)]))
    grammar = 'start: a\na: a a a | a a | "e" | " " | "o"'
    yield Case("grammar ambiguous", CHAT, {**form(grammar=grammar), "max_tokens": 200})
    yield Case("stop 128", CHAT, chat(stop=[f"zz{i}" for i in range(128)]))
    yield Case("stop 10000", CHAT, chat(stop=[f"zz{i}" for i in range(10000)]))
    yield Case("logit_bias 2048", CHAT, chat(logit_bias=dict.fromkeys(map(str, range(2048)), 1)))
    bias = dict.fromkeys(map(str, range(100_000)), 1)
    yield Case("logit_bias 100000", CHAT, chat(logit_bias=bias))
    yield Case("bad_words 512", CHAT, chat(bad_words=[f"w{i} x" for i in range(512)]))
    long_words = ["hello world " * 20 + str(i) for i in range(5000)]
    yield Case("bad_words 5000 long", CHAT, chat(bad_words=long_words))
    yield Case("allowed_token_ids 32768", CHAT, chat(allowed_token_ids=list(range(2000)) * 16))
    yield Case("n 128", CHAT, chat(n=128, max_tokens=1))
    yield Case("n 1000000", CHAT, chat(n=10**6))
    yield Case("prompts 250", COMPLETIONS, {"prompt": ["hi"] * 250, "max_tokens": 1}, tokens=500)
    yield Case("prompts 10000", COMPLETIONS, {"prompt": ["hi"] * 10000, "max_tokens": 1})
    hi = [400] * 1000
    yield Case("plain 1000 tokens", COMPLETIONS, {"prompt": hi, "max_tokens": 1}, tokens=1000)
    for most in 20, 2048:
        body = {"prompt": hi, "max_tokens": 1, "prompt_logprobs": most}
        yield Case(f"prompt_logprobs {most}", COMPLETIONS, body, tokens=1000)
    echo = {"prompt": hi, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True}
    yield Case("echo with logprobs, streamed", COMPLETIONS, echo, tokens=1000)
    yield Case(
        "logprobs 20, n 16", CHAT, chat(n=16, max_tokens=100, logprobs=True, top_logprobs=20)
    )
    yield Case(
        "logprobs 20, n 128", CHAT, chat(n=128, max_tokens=20, logprobs=True, top_logprobs=20)
    )
    yield Case("messages 2048", CHAT, chat(messages=HI * 2048))
    yield Case("messages 100000", CHAT, chat(messages=HI * 100_000))
    for count in 1024, 18_000, 45_000:
        parts = [{"type": "text", "text": "x"}] * count
        user = [{"role": "user", "content": parts}]
        yield Case(f"parts {count}", CHAT, chat(messages=user), tokens=1024)
    yield Case("tools 1024", CHAT, chat(tools=tools(1024)))
    yield Case("tools 5000", CHAT, chat(tools=tools(5000)))
    yield Case("tools 200, required", CHAT, chat(tools=tools(200), tool_choice="required"))
    long = {"prompt": hi * 3, "max_tokens": 900, "ignore_eos": True}
    yield Case("3000 tokens, leaves", COMPLETIONS, long, leaves=True, tokens=3000)
    fits = {**said("Anna walks to the old mill. " * 300), "max_tokens": 900}
    yield Case("text that fits, leaves", CHAT, fits, leaves=True, tokens=3000)
    answers = chat(n=8, max_tokens=900, ignore_eos=True)
    yield Case("8 long answers, leaves", CHAT, answers, leaves=True)
    yield Case("text 200 kB", CHAT, said("hello wörld " * 17_000))
    for megabytes in 1, 8, 30:
        words = said("hello wörld " * (megabytes << 16))
        yield Case(f"text {megabytes} MB", CHAT, words)
        yield Case(f"text {megabytes} MB, leaves", CHAT, words, leaves=True)
    yield Case("a 30 MB", CHAT, said("a" * (30 << 20)))
    yield Case("/tokenize 8 MB", "/tokenize", {"prompt": "0 1 2 " * (8 << 18)})
    yield Case("escapes 5 MB", CHAT, b'{"messages":"' + b"\\u00e9" * 800_000 + b'"}')
    yield Case("[ 30 MB", CHAT, b'{"messages":' + b"[" * (30 << 20))
    yield Case("[],[], 2 MB", CHAT, b'{"messages":[' + b"[]," * (2 << 18) + b"1]}")
    yield Case("numbers 30 MB", CHAT, b'{"messages":[' + b"1," * (15 << 20) + b"1]}")
    yield Case("numbers 1.9 MB", CHAT, b'{"messages":[' + b"1," * 950_000 + b"1]}")


class Others:
    """A steady stream, and /health several times a second, in a thread."""

    def __init__(self, url: str) -> None:
        self.url, self.run = url, LoadRun()
        self.health: list[tuple[float, float]] = []  # (when it ended, seconds; inf: it failed)
        self.may_end = False  # whether the server may end
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()

    async def _run(self) -> None:
        steady = [{"prompt": "hello", "max_tokens": 3000}] * 1000
        asking = asyncio.ensure_future(self._ask_health())
        with suppress(httpx.HTTPError, MetalLiteError):  # the server ends
            await send(self.url, "demo", [steady], self.run, seconds=1e6)
        asking.cancel()

    async def _ask_health(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)  # a new connection each time
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as http:
            try:
                while True:
                    started = time.perf_counter()
                    (await http.get(f"{self.url}/health")).raise_for_status()
                    now = time.perf_counter()
                    self.health.append((now, now - started))
                    await asyncio.sleep(0.02)
            except httpx.HTTPError as e:
                self.health.append((time.perf_counter(), inf))
                if not self.may_end:
                    say(f"/health is asked no more: {one_line(e)}")

    def longest_since(self, started: float) -> tuple[float, float]:
        """(gap, health)."""
        chunks = [at for request in self.run.requests for at in request.chunks]
        gaps = [b - a for a, b in pairwise([*chunks, time.perf_counter()]) if b > started]
        health = [seconds for at, seconds in self.health if at > started]
        return max(gaps), max(health, default=inf)


class Proof:
    """Sends cases while the others run."""

    def __init__(self, url: str, http: httpx.Client, pid: int) -> None:
        self.http, self.others = http, Others(url)
        time.sleep(4)
        self.pids = pid, self._status()["models"][0]["pid"]
        self.known: list[float] | None = None  # memory at the end of the first round
        self.plain: dict[int, float] = {}

    def _status(self) -> dict[str, Any]:
        return self.http.get("/status", timeout=60).json()

    def _send(self, path: str, body: bytes, leaves: bool = False) -> str:
        """The status of the reply, or a word for another end."""
        try:
            reply = self.http.post(path, content=body, timeout=LEAVES if leaves else 300)
            return str(reply.status_code)
        except httpx.TransportError as e:
            return "left" if leaves else type(e).__name__

    def memory(self) -> list[float]:
        """MiB of the server and of the engine, without the freed buffers that MLX keeps."""
        kept = self._status()["models"][0]["metrics"]["memory_cached_bytes"] / 2**20
        server, engine = (rss_mib(pid) or 0.0 for pid in self.pids)
        return [server, engine - kept]

    def _left(self) -> int:
        """The requests that still run beside the steady stream, after a while."""
        end = time.perf_counter() + LEFT
        while True:
            now = self._status()
            engine = now["models"][0]["metrics"]["requests_running"]
            left = max(now["server"]["running"], engine) - 1
            if left <= 0 or time.perf_counter() > end:
                return left
            time.sleep(0.1)

    def _beside_plain(self, tokens: int) -> float:
        """The longest gap while a plain prompt of as many tokens runs."""
        if tokens not in self.plain:
            body = {"prompt": [5 + tokens % 7] * tokens, "max_tokens": 5}
            self.plain[tokens] = self._gap(Case("", COMPLETIONS, body))[1]
        return self.plain[tokens]

    def _gap(self, case: Case) -> tuple[str, float, float, float]:
        body = case.raw  # before the clock starts: encoding stops the others' thread
        started = time.perf_counter()
        how = self._send(case.path, body, case.leaves)
        seconds = time.perf_counter() - started
        time.sleep(0.5)
        return how, *self.others.longest_since(started), seconds

    def rows(self, chosen: list[Case]) -> Iterator[tuple[str, ...]]:
        """Run all cases twice; a row each."""
        for _ in range(2):
            for case in chosen:
                yield self._row(case)
            self.known = self.memory()

    def _row(self, case: Case) -> tuple[str, ...]:
        plain = self._beside_plain(case.tokens)
        how, gap, health, seconds = self._gap(case)
        memory = self.memory()
        grown = max(now - before for now, before in zip(memory, self.known or memory, strict=True))
        left = self._left()
        exceeded = {"gap": gap > plain + GAP, "health": health > HEALTH}
        exceeded |= {"memory": grown > MEMORY, "left": left > 0}
        faults = [name for name, is_so in exceeded.items() if is_so]
        numbers = f"{seconds:.1f}", f"{gap:.2f}", f"{plain:.2f}", f"{1e3 * health:.0f}"
        return case.name, how, *numbers, *(f"{mib:.0f}" for mib in memory), ", ".join(faults)

    def end(self) -> bool:
        """Send SIGTERM while requests run; returns whether the server ends in time."""
        words = Case("", CHAT, said("hello wörld " * (8 << 16))).raw
        threading.Thread(target=self._send, args=[CHAT, words], daemon=True).start()
        time.sleep(0.2)
        self.others.may_end = True
        started = time.perf_counter()
        os.kill(self.pids[0], signal.SIGTERM)
        while rss_mib(self.pids[0]) is not None and time.perf_counter() < started + 60:
            time.sleep(0.1)
        seconds = time.perf_counter() - started
        print(f"SIGTERM with --drain {DRAIN}: ended after {seconds:.1f} s")
        return seconds < DRAIN + 5


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", action="append", metavar="TEXT")
    args = parser.parse_args()
    chosen = [c for c in cases() if not args.only or any(o in c.name for o in args.only)]
    if not chosen:
        raise MetalLiteError(f"no case's name contains {' or '.join(map(repr, args.only))}")
    # Without --num-blocks the store grows when it is first used.
    command = ours("demo", "--drain", str(DRAIN), "--num-blocks", "640")
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.txt"
        with (
            server(command, log) as (url, pid),
            # Another client than the steady stream's.
            httpx.Client(base_url=url, headers={"User-Agent": "x"}, trust_env=False) as http,
        ):
            proof = Proof(url, http, pid)
            passed = [not row[-1] for row in print_table(HEADS, proof.rows(chosen))]
            passed.append(proof.end())
        if has_trace(log):
            passed.append(False)
    print(f"{passed.count(False)} of {len(passed)} harmed others")
    return 1 if False in passed else 0


if __name__ == "__main__":
    run_main(main)
