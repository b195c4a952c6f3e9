"""`/events`: what the engines do, while a client watches.

All viewers get the same events; a slow one misses the oldest.  An engine sends events between its
steps, for some seconds after `watch`.  The server adds events with the state of each model and the
number of its requests, also during a step and after the end of an engine's process.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_metal_lite.server.served_model import Model
from vllm_metal_lite.server.server import Server
from vllm_metal_lite.server.stream import KEEP_ALIVE, EventStream, sse

# Seconds from one state to the next, from one call of `watch` to the next, and that a call lasts.
_SENT, _RENEWED, _WATCHED = 0.5, 2.0, 5.0
_MAX_UNREAD = 16  # events; a slower viewer misses the oldest


class Live:
    """Watches the loaded models while there are viewers, and shows all viewers the same."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._viewers: set[asyncio.Queue[bytes]] = set()  # a viewer's queue has its unread events
        self._latest: dict[str, bytes] = {}  # by model; the states are under ""
        self._watching: asyncio.Task[None] | None = None

    async def events(self) -> AsyncGenerator[bytes, None]:
        viewer = asyncio.Queue[bytes](_MAX_UNREAD)
        for event in self._latest.values():
            _show(viewer, event)
        self._viewers.add(viewer)
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        try:
            while event := await viewer.get():
                yield event
        finally:
            self._viewers.discard(viewer)

    async def _watch(self) -> None:
        """Keep the engines sending, and send their states, until the last viewer has left or the
        server drains."""
        renew_at = 0.0
        while self._viewers and not self._server.draining:
            if (now := time.monotonic()) >= renew_at:
                renew_at = now + _RENEWED
                loaded = self._server.models.loaded
                for name in self._latest.keys() - {"", *loaded}:
                    del self._latest[name]
                for name, client in loaded.items():
                    client.watch(_WATCHED, partial(self._send_engine, name))
            self._send_states()
            await asyncio.sleep(_SENT)
        self._watching = None
        self._latest.clear()
        self._send(b"")  # the end

    def _send_states(self) -> None:
        """Show the states of the models if they changed or requests are under way."""
        states = [_state(model) for model in self._server.models.by_name.values()]
        event = sse(json.dumps(states), "models")
        if event != self._latest.get("") or any(state["requests"] for state in states):
            self._latest[""] = event
            self._send(event)

    def _send_engine(self, name: str, text: str) -> None:
        if not self._viewers:  # engines still send for some seconds after the last viewer left
            return
        event = self._latest[name] = sse(f'{{"model":{json.dumps(name)},{text[1:]}', "engine")
        self._send(event)

    def _send(self, event: bytes) -> None:
        for viewer in self._viewers:
            _show(viewer, event)


def _show(viewer: asyncio.Queue[bytes], event: bytes) -> None:
    if viewer.full():
        viewer.get_nowait()
    viewer.put_nowait(event)


def _state(model: Model) -> dict[str, Any]:
    return {
        "model": model.spec.name,
        "state": model.state,
        "error": model.error,
        "requests": model.num_unfinished,
    }


def routes(server: Server) -> list[Route]:
    live = Live(server)

    async def events(request: Request) -> Response:
        if request.method == "HEAD":  # Starlette allows it wherever GET is
            return Response(media_type="text/event-stream")
        shown, leaving = live.events(), AsyncExitStack()
        leaving.push_async_callback(shown.aclose)
        return EventStream(shown, KEEP_ALIVE, server.config.keep_alive, leaving)

    return [Route("/events", events)]
