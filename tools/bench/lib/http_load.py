"""The clients of `tools.bench.server`, in their own process, with raw sockets at little cost.

    python -m tools.bench.lib.http_load http://127.0.0.1:8000 < job.json

job.json: {"model", "clients": [[body, ...], ...], "health": bool, "seconds"}.  All clients run at
once; each sends its bodies one after the other, as streamed completions, or as chats if a body has
messages.  Prints the `Done` of the load as JSON.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

COMMON = {"temperature": 0, "ignore_eos": True, "stream": True}
COMMON |= {"stream_options": {"include_usage": True}}


@dataclass
class Reply:
    """A request that ended.  turn: its number within its client.

    first, end, gaps: seconds from the request to the first chunk, from the start of the load to the
    end, and between chunks.  tokens, prompt, cached: by the server's usage.
    """

    turn: int
    first: float | None
    end: float
    gaps: list[float]
    tokens: int
    prompt: int
    cached: int


@dataclass
class Done:
    """A load: the requests that ended in time, its seconds, and those of each /health beside it."""

    requests: list[Reply]
    seconds: float
    health: list[float]

    @classmethod
    def from_json(cls, text: str) -> "Done":
        read = json.loads(text)
        return cls(**{**read, "requests": [Reply(**one) for one in read["requests"]]})


async def send(url: str, method: str, path: str, body: bytes = b"") -> Connection:
    """Send a request on a new connection; the reader is after the headers.

    The connection closes when the writer is dropped.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{path}: {status!r} {(await reader.read())[-300:]!r}")
    while await reader.readline() not in (b"\r\n", b""):
        pass
    return reader, writer


async def stream(url: str, body: dict[str, Any], turn: int, started: float) -> Reply:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    sent = time.perf_counter()
    reader, _writer = await send(url, "POST", path, json.dumps(body).encode())
    first, last, usage, gaps = None, 0.0, {}, []
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        if b'"usage":' in line and b'"completion_tokens"' in line:
            usage = json.loads(line[6:])["usage"]
        elif first is not None:
            gaps.append(now - last)
            last = now
        elif b'"content":""' not in line.replace(b" ", b""):  # chats begin with the role alone
            first, last = now - sent, now
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        turn,
        first,
        time.perf_counter() - started,
        gaps,
        tokens=usage.get("completion_tokens", 0),
        prompt=usage.get("prompt_tokens", 0),
        cached=details.get("cached_tokens", 0),
    )


async def ask_health(url: str, seconds: list[float]) -> None:
    while True:
        started = time.perf_counter()
        reader, _writer = await send(url, "GET", "/health")
        await reader.read()
        seconds.append(time.perf_counter() - started)
        await asyncio.sleep(0.02)


async def main(url: str, job: dict[str, Any]) -> Done:
    health: list[float] = []
    done: list[Reply] = []
    asking = asyncio.ensure_future(ask_health(url, health)) if job["health"] else None
    started = time.perf_counter()

    async def client(bodies: list[dict[str, Any]]) -> None:
        for turn, body in enumerate(bodies):
            whole = {"model": job["model"], **COMMON, **body}
            done.append(await stream(url, whole, turn, started))

    running = [asyncio.ensure_future(client(bodies)) for bodies in job["clients"]]
    ended, _ = await asyncio.wait(running, timeout=job["seconds"])
    seconds = time.perf_counter() - started
    if asking is not None:
        asking.cancel()
    for task in ended:
        task.result()
    return Done(list(done), seconds, health)


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(main(sys.argv[1], json.load(sys.stdin))))), flush=True)
