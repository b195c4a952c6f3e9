#!/usr/bin/env python3
"""The clients of `tools.bench.server`: a process of their own, raw sockets, little cost.

    python -m tools.bench.lib.server_client http://127.0.0.1:8000 < jobs.json

jobs.json: {"path", "clients": [[body, ...], ...], "health": bool}; a client sends its bodies, each
a streamed completion, one behind the other.  Prints one JSON object: seconds from each request to
its first token, seconds until its end, tokens by the server's usage, and, if asked for, seconds
that each /health took beside the load.
"""

import asyncio
import json
import resource
import sys
import time
from typing import Any
from urllib.parse import urlsplit

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def send(url: str, method: str, path: str, body: bytes = b"") -> Connection:
    """Send a request on a new connection; the reader is behind the headers.

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


async def stream(url: str, path: str, body: dict[str, Any], started: float) -> dict[str, Any]:
    """One streamed completion: {"first", "end", "tokens", "gaps", "chunks", "prompt", "cached"}.

    In seconds, the end since `started`; gaps: between chunks; prompt, cached: tokens by the
    server's usage.
    """
    sent = time.perf_counter()
    reader, _writer = await send(url, "POST", path, json.dumps(body).encode())
    first, last, usage = None, 0.0, {}
    gaps: list[float] = []
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        if b'"usage":' in line and b'"completion_tokens"' in line:
            usage = json.loads(line[6:])["usage"]
        elif first is None:
            # Chat streams begin with the role, before any token.
            if b'"content":""' not in line.replace(b" ", b""):
                last = time.perf_counter()
                first = last - sent
        else:
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
    end = time.perf_counter() - started
    details = usage.get("prompt_tokens_details") or {}
    return {
        "first": first, "end": end, "tokens": usage.get("completion_tokens"), "gaps": gaps,
        "chunks": len(gaps) + (first is not None),
        "prompt": usage.get("prompt_tokens"), "cached": details.get("cached_tokens", 0),
    }  # fmt: skip


async def ask_health(url: str, seconds: list[float]) -> None:
    while True:
        started = time.perf_counter()
        reader, _writer = await send(url, "GET", "/health")
        await reader.read()
        seconds.append(time.perf_counter() - started)
        await asyncio.sleep(0.02)


async def main(url: str, job: dict[str, Any]) -> dict[str, Any]:
    health: list[float] = []
    asking = asyncio.ensure_future(ask_health(url, health)) if job.get("health") else None
    started = time.perf_counter()

    async def client(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [await stream(url, job["path"], body, started) for body in bodies]

    done = await asyncio.gather(*map(client, job["clients"]))
    if asking is not None:
        asking.cancel()
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime
    return {"requests": [one for each in done for one in each], "health": health, "client_cpu": cpu}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], json.load(sys.stdin)))))
