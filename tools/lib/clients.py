"""Clients of an HTTP server, all at once; each sends its requests one after the other."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm_metal_lite import MetalLiteError

COMMON = {"temperature": 0, "ignore_eos": True, "stream": True}
COMMON |= {"stream_options": {"include_usage": True}}

Clients = Sequence[Sequence[dict[str, Any]]]  # bodies, by client


@dataclass
class Request:
    """A request and the times of its answer.

    turn: its number among the requests of its client.  sent: when it was sent.
    chunks: when each chunk came.  usage: the server's counts; None until the answer has ended.
    """

    turn: int
    sent: float
    chunks: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None

    @property
    def first(self) -> float:
        """Seconds until the first chunk."""
        return self.chunks[0] - self.sent

    @property
    def cached(self) -> int:
        return ((self.usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens", 0)


@dataclass
class LoadRun:
    """The requests of clients, while they run.  seconds: how long the whole load took."""

    requests: list[Request] = field(default_factory=list)
    seconds: float = 0.0


async def send(url: str, model: str, clients: Clients, run: LoadRun, seconds: float) -> None:
    """Send the requests of all clients, for at most `seconds`.

    A body with messages is a chat, another one a completion; both are streamed.
    """
    limits = httpx.Limits(max_keepalive_connections=0)  # a new connection for each request
    async with httpx.AsyncClient(
        base_url=url, timeout=None, limits=limits, trust_env=False
    ) as http:

        async def client(bodies: Sequence[dict[str, Any]]) -> None:
            for turn, body in enumerate(bodies):
                run.requests.append(Request(turn, time.perf_counter()))
                await _ask(http, {**COMMON, "model": model, **body}, run.requests[-1])

        started = time.perf_counter()
        running = [asyncio.ensure_future(client(bodies)) for bodies in clients]
        ended, late = await asyncio.wait(running, timeout=seconds)
        run.seconds = time.perf_counter() - started
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        if errors := [error for task in ended if (error := task.exception())]:
            raise errors[0]


async def _ask(http: httpx.AsyncClient, body: dict[str, Any], request: Request) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with http.stream("POST", path, json=body) as reply:
        if reply.status_code != 200:
            said = (await reply.aread())[-300:]
            raise MetalLiteError(f"{path}: {reply.status_code} {said!r}")
        usage: dict[str, Any] = {}
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if line.startswith('data: {"error":'):
                raise MetalLiteError(f"{path}: {line[6:306]}")
            if '"usage":' in line and '"completion_tokens"' in line:
                usage = json.loads(line[6:])["usage"]
            # Chats begin with the role alone.
            elif request.chunks or '"content":""' not in line.replace(" ", ""):
                request.chunks.append(time.perf_counter())
        request.usage = usage
