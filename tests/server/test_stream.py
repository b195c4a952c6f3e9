"""Streams of events, and clients that leave, over a simulated connection."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from vllm_metal_lite.server.stream import KEEP_ALIVE, ClientGone, EventStream, until_gone


class Connection:
    """gone: set when the client goes.  broken: the watch for that fails.  reads: a client does."""

    def __init__(self, broken: bool = False, reads: bool = True) -> None:
        self.gone, self.closed = asyncio.Event(), asyncio.Event()
        self._broken, self._reads = broken, reads
        self.sent: list[bytes] = []

    async def receive(self) -> dict:
        if self._broken:
            raise ConnectionError("the watch has failed")
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        if message["type"] == "http.response.body":
            if not self._reads:
                await asyncio.Event().wait()
            self.sent.append(message["body"])

    async def stream(self, events: AsyncIterator[bytes], seconds: float = 60.0) -> None:
        resources = AsyncExitStack()
        resources.callback(self.closed.set)
        response = EventStream(events, KEEP_ALIVE, seconds, resources)
        await response({"type": "http"}, self.receive, self.send)


async def endless(ended: asyncio.Event) -> AsyncIterator[bytes]:
    try:
        yield b"first"
        await asyncio.Event().wait()
    finally:
        ended.set()


async def forever(begun: asyncio.Event, cancelled: asyncio.Event) -> None:
    try:
        begun.set()
        await asyncio.Event().wait()
    finally:
        cancelled.set()


async def few() -> AsyncIterator[bytes]:
    yield b"one"
    yield b"two"


async def test_a_stream_ends_by_itself():
    connection = Connection()
    await connection.stream(few())
    assert connection.sent == [b"one", b"two", b""]
    assert connection.closed.is_set()


async def test_a_client_that_goes_ends_the_events():
    connection, ended = Connection(), asyncio.Event()
    streaming = asyncio.ensure_future(connection.stream(endless(ended)))
    while not connection.sent:
        await asyncio.sleep(0)
    connection.gone.set()
    await streaming
    assert ended.is_set()
    assert connection.closed.is_set()


async def test_a_client_that_never_reads_may_go():
    connection, ended = Connection(reads=False), asyncio.Event()
    streaming = asyncio.ensure_future(connection.stream(endless(ended), 0.001))
    await asyncio.sleep(0.05)  # events and keep-alive events wait for the client
    assert not connection.closed.is_set()
    connection.gone.set()
    await streaming
    assert connection.closed.is_set()
    await ended.wait()


async def test_a_long_silence_is_broken():
    connection = Connection()
    streaming = asyncio.ensure_future(connection.stream(endless(asyncio.Event()), 0.001))
    while connection.sent.count(KEEP_ALIVE) < 3:
        await asyncio.sleep(0.001)
    assert connection.sent[0] == b"first"
    connection.gone.set()
    await streaming


async def test_a_stream_leaves_neither_tasks_nor_errors_behind():
    """A keep-alive event cannot be sent."""

    class Broken(Connection):
        async def send(self, message: dict) -> None:
            if message.get("body") == KEEP_ALIVE:
                raise ConnectionError
            await super().send(message)

    async def slow() -> AsyncIterator[bytes]:
        yield b"one"
        await asyncio.sleep(0.01)

    connection, errors, before = Broken(), [], asyncio.all_tasks()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    await connection.stream(slow(), 0.001)
    assert asyncio.all_tasks() == before
    gc.collect()  # an error that nobody asked for is reported when its task goes
    assert errors == []
    assert connection.sent == [b"one", b""]


async def test_events_that_fail_fail_the_response():
    async def failing() -> AsyncIterator[bytes]:
        yield b"one"
        raise ZeroDivisionError

    connection = Connection()
    with pytest.raises(ZeroDivisionError):
        await connection.stream(failing())
    assert connection.sent == [b"one"]  # without the end of a stream
    assert connection.closed.is_set()


async def test_a_watch_that_fails_is_not_a_client_that_goes():
    connection, ended = Connection(broken=True), asyncio.Event()
    with pytest.raises(ConnectionError):
        await connection.stream(endless(ended))
    assert connection.closed.is_set()

    cancelled = asyncio.Event()
    with pytest.raises(ConnectionError):
        await until_gone(connection.receive, forever(asyncio.Event(), cancelled))
    assert cancelled.is_set()


async def test_work_ends_with_its_client():
    connection, cancelled = Connection(), asyncio.Event()
    with pytest.raises(ClientGone):
        await until_gone(connection.receive, forever(connection.gone, cancelled))
    assert cancelled.is_set()


async def test_the_result_and_the_error_of_work_come_through():
    connection = Connection()

    async def result() -> int:
        return 7

    async def error() -> None:
        raise ZeroDivisionError

    assert await until_gone(connection.receive, result()) == 7
    with pytest.raises(ZeroDivisionError):
        await until_gone(connection.receive, error())
