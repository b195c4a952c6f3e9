"""Clients of an HTTP server, all at once; each sends its requests one after the other."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

COMMON = {"temperature": 0, "ignore_eos": True, "stream": True}
COMMON |= {"stream_options": {"include_usage": True}}

Clients = Sequence[Sequence[dict[str, Any]]]  # bodies, by client


@dataclass
class Reply:
    """A request that ended.  turn: its number within its client.

    first, gaps: seconds from the request to the first chunk, and between chunks.  tokens, prompt,
    cached: by the server's usage.
    """

    turn: int
    first: float | None
    gaps: list[float]
    tokens: int
    prompt: int
    cached: int


@dataclass
class Done:
    """A load: the requests that ended in time, its seconds, and those of each /health beside it."""

    replies: list[Reply]
    seconds: float
    health: list[float]


async def send(url: str, model: str, clients: Clients, seconds: float, health: bool) -> Done:
    """Send the requests of all clients, for so many seconds at most.

    health: ask for /health meanwhile.  A body with messages is a chat, another one a completion;
    both are streamed.
    """
    done = Done([], 0.0, [])
    limits = httpx.Limits(max_keepalive_connections=0)  # a new connection for each request
    async with httpx.AsyncClient(
        base_url=url, timeout=None, limits=limits, trust_env=False
    ) as http:

        async def client(bodies: Sequence[dict[str, Any]]) -> None:
            for turn, body in enumerate(bodies):
                done.replies.append(await _ask(http, {**COMMON, "model": model, **body}, turn))

        async def ask_health() -> None:
            while True:
                started = time.perf_counter()
                await http.get("/health")
                done.health.append(time.perf_counter() - started)
                await asyncio.sleep(0.02)

        started = time.perf_counter()
        asking = [asyncio.ensure_future(ask_health())] if health else []
        running = [asyncio.ensure_future(client(bodies)) for bodies in clients]
        ended, late = await asyncio.wait(running, timeout=seconds)
        done.seconds = time.perf_counter() - started
        for task in (*asking, *late):
            task.cancel()
        await asyncio.gather(*asking, *late, return_exceptions=True)
        if errors := [error for task in ended if (error := task.exception())]:
            raise errors[0]
    return done


async def _ask(http: httpx.AsyncClient, body: dict[str, Any], turn: int) -> Reply:
    """Send a request and read its stream."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    sent = time.perf_counter()
    first, last, usage, gaps = None, 0.0, {}, []
    async with http.stream("POST", path, json=body) as reply:
        if reply.status_code != 200:
            said = (await reply.aread())[-300:]
            raise RuntimeError(f"{path}: {reply.status_code} {said!r}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            if '"usage":' in line and '"completion_tokens"' in line:
                usage = json.loads(line[6:])["usage"]
            elif first is not None:
                gaps.append(now - last)
                last = now
            elif '"content":""' not in line.replace(" ", ""):  # chats begin with the role alone
                first, last = now - sent, now
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    tokens, prompt = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
    return Reply(turn, first, gaps, tokens, prompt, cached)
