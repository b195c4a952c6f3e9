"""Streams of server-sent events, which end when the client goes."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

# Without spaces, and without a check for cycles, because an event is sent for each token.
encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies pass each event on at once
}


class ClientGone(Exception):
    """The client has closed the connection."""


async def cancel_if(event: Awaitable[Any], error: type[Exception], work: Awaitable[T]) -> T:
    """The result of `work`.  If `event` comes first, `work` is cancelled and `error` is raised."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(event)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            watch.result()  # raises if the watch itself has failed
            raise error
        return task.result()
    finally:
        for unfinished in task, watch:
            unfinished.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`.  If the client goes, `work` is cancelled and ClientGone is raised.

    The body of the request must have been read.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    return await cancel_if(gone(), ClientGone, work)


class EventStream(Response):
    """Sends events as they come.

    events: encoded events.
    keep_alive: an event that the client's parser ignores, or a function that makes one.  It is sent
    after `seconds` without an event.
    resources: they are closed at the end, also if the client goes.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        keep_alive: bytes | Callable[[], bytes],
        seconds: float,
        resources: AsyncExitStack,
    ) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers(_HEADERS)
        del self.headers["content-length"]
        self._events, self._resources = events, resources
        self._keep_alive, self._seconds = keep_alive, seconds

    @classmethod
    def late(
        cls,
        answer: asyncio.Task[Response],
        progress: Callable[[], str],
        failed: Callable[[Exception], bytes],
        seconds: float,
    ) -> "EventStream":
        """A stream that begins now: comments about the progress, then the events of a later stream.

        answer: gives the later stream.  failed: makes the event for an error of `answer`.
        """

        def comment() -> bytes:
            return f": {progress()}\n\n".encode()

        async def events() -> AsyncGenerator[bytes, None]:
            yield comment()
            try:
                later = await answer
            except Exception as e:
                yield failed(e)
                return
            assert isinstance(later, EventStream), "a request for a stream gets a stream"
            stream._keep_alive = later._keep_alive
            async with later._resources:
                async for event in later._events:
                    yield event

        made, resources = events(), AsyncExitStack()
        resources.push_async_callback(discard, answer)  # if the client goes before the answer
        resources.push_async_callback(made.aclose)
        stream = cls(made, comment, seconds, resources)
        return stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(ClientGone):
                await until_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        self._sent_at = time.monotonic()
        keeping = asyncio.ensure_future(self._send_keep_alives(send))
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                self._sent_at = time.monotonic()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_keep_alives(self, send: Send) -> None:
        while True:
            left = self._sent_at + self._seconds - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
                continue
            event = self._keep_alive() if callable(self._keep_alive) else self._keep_alive
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self._sent_at = time.monotonic()


async def discard(answer: asyncio.Task[Response]) -> None:
    """Cancel the work for a response, and release all that its stream holds."""
    answer.cancel()
    (response,) = await asyncio.gather(answer, return_exceptions=True)
    if isinstance(response, EventStream):
        await response._resources.aclose()


def sse(data: str, event: str | None = None) -> bytes:
    """The bytes of one event.  data: one line, such as JSON."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {data}\n\n".encode()


def event(kind: str, **fields: Any) -> bytes:
    """The bytes of an event whose data is an object.  Both the event and the object name the
    type."""
    return sse(encode({"type": kind, **fields}), kind)


KEEP_ALIVE = b": keep-alive\n\n"  # ignored by every parser of events
DONE = sse("[DONE]")  # the end of OpenAI's streams
