"""The engine for coroutines, which stream outputs while one thread runs steps.

The thread owns the engine.  Other code queues calls, which the thread runs between steps, so an
abort takes effect by the next step.
"""

import asyncio
import atexit
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from vllm_metal_lite.backend import mx
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.engine.one_thread import check_process, held
from vllm_metal_lite.engine.prompt_ids import Prompt
from vllm_metal_lite.engine.step_loop import run_steps
from vllm_metal_lite.errors import ConfigError, show
from vllm_metal_lite.outputs import RequestOutput
from vllm_metal_lite.sampling_params import SamplingParams

_SHUT_DOWN = "the engine was shut down"


class _Stream:
    """Passes a request's state from the engine's thread to its coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        self._output = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error.  Call before aborting the request: the abort updates the
        state in place, and it would show a normal end."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed: no reader is left
            self._loop.call_soon_threadsafe(self._news.set)

    async def get(self) -> tuple[RequestOutput, bool]:
        """The state, once it is new, and whether it is the last.  Raises the error passed to
        `fail`."""
        await self._news.wait()
        self._news.clear()
        output = self._output
        finished = output is not None and output.finished
        if self._error is not None:  # checked last, see `fail`
            raise self._error
        assert output is not None, "only `fail` gives no state"
        return output, finished


class AsyncEngine:
    """Streams answers from an LLMEngine that runs in its own thread."""

    def __init__(self, engine: LLMEngine) -> None:
        if not isinstance(engine, LLMEngine):
            raise ConfigError(f"AsyncEngine needs an LLMEngine, got {show(engine)}")
        self._engine = engine
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = (
            queue.SimpleQueue()
        )
        self._closed = False
        self._closing = threading.Lock()  # no call is queued after None, which ends the thread
        self._streams: dict[str, _Stream] = {}  # used only by the engine's thread
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="vllm-metal-lite", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        checkpoints: Sequence[int] = (),
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's state (all output so far) whenever it grows.

        The yielded object is updated in place.  Leaving the loop early aborts the request.
        The arguments are those of `LLMEngine.add_request`.
        Raises RequestError, SamplingError or BusyError if the engine refuses the request.
        """
        request_id = request_id if request_id is not None else f"async-{next(self._ids)}"
        stream = _Stream()

        def add() -> None:
            self._engine.add_request(
                request_id, prompt, params, priority=priority, checkpoints=checkpoints
            )
            self._streams[request_id] = stream

        adding = self._submit(add)
        try:
            await asyncio.wrap_future(adding)
            finished = False
            while not finished:
                output, finished = await stream.get()
                yield output
        finally:
            if not (adding.done() and not adding.cancelled() and adding.exception()):
                self._submit(lambda: self._abort(request_id, stream))

    async def abort(self, request_id: str) -> None:
        """End a request with its current tokens; finish_reason is "abort"."""
        await asyncio.wrap_future(self._submit(lambda: self._abort(request_id)))

    async def metrics(self) -> dict[str, int]:
        return await asyncio.wrap_future(self._submit(self._engine.metrics))

    def shutdown(self) -> None:
        """Stop the thread after the current step; open streams and later calls get an error."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        self._thread.join()
        atexit.unregister(self.shutdown)

    def _submit(self, call: Callable[[], Any]) -> Future:
        check_process()
        future: Future = Future()
        with self._closing:
            if self._closed:
                future.set_exception(RuntimeError(_SHUT_DOWN))
            else:
                self._calls.put((call, future))
        return future

    def _abort(self, request_id: str, stream: _Stream | None = None) -> None:
        if stream is not None and self._streams.get(request_id) is not stream:
            return  # it has finished; a new request may use its id
        self._deliver(self._engine.abort(request_id))

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)
                if output.finished:
                    del self._streams[output.request_id]

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        for request_id in request_ids:
            if (stream := self._streams.pop(request_id, None)) is not None:
                stream.fail(error)

    def _run(self) -> None:
        try:
            with held(self._engine.lock, wait=True):
                run_steps(
                    self._engine,
                    has_call=lambda: not self._calls.empty(),
                    take_call=self._take_call,
                    deliver=self._deliver,
                    fail=self._fail,
                )
        finally:
            with suppress(Exception):  # the error of an abandoned step
                self._engine.runner.synchronize()
            # MLX aborts the process if a thread's streams still exist when it exits.
            mx.synchronize()
            mx.clear_streams()

    def _take_call(self) -> bool:
        if (item := self._calls.get()) is None:
            lost = list(self._streams)
            self._fail(lost, RuntimeError(_SHUT_DOWN))
            self._engine.abort(lost)
            return False
        call, future = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as e:
                future.set_exception(e)
        return True
