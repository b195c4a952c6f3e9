"""The server's side of an engine's process.

Two threads move messages through the pipe, so that the event loop never waits for the engine: the
engine's process reads only between steps, and a step of a long prompt can take seconds.
"""

import asyncio
import itertools
import logging
import multiprocessing
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import ModelLoadError, RequestError
from vllm_metal_lite.model.loader import load_tokenizer_only
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.worker import process
from vllm_metal_lite.server.worker.generation import EngineLost, Generation
from vllm_metal_lite.server.worker.messages import (
    Abort,
    Add,
    Added,
    Call,
    Failed,
    Log,
    Lost,
    ModelFacts,
    Ready,
    Refused,
    Returned,
    Seen,
    Stepped,
    Stop,
)

logger = logging.getLogger("vllm_metal_lite")

_STOP_SECONDS = 10  # then the process is killed


class EngineClient:
    """An engine in a process of its own.  Use from one event loop.

    metrics: the latest `LLMEngine.metrics()`, at most about a second old while steps run.
    on_seen: gets the JSON of `watch.py`, for those who watch.
    """

    facts: ModelFacts
    tokenizer: TokenizerWrapper

    def __init__(self, name: str, config: EngineConfig) -> None:
        """Start the process.  `start` also waits until the model is loaded."""
        self.metrics: dict[str, int] = {}
        self.on_seen: Callable[[str], None] = lambda text: None
        self.generations: dict[str, Generation] = {}  # unfinished, by request id
        self._loop = asyncio.get_running_loop()
        self._added: dict[str, asyncio.Future[None]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ready: asyncio.Future[ModelFacts] = self._loop.create_future()
        self.ended = asyncio.Event()  # the process has ended
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=process.main, args=(theirs, name, config), name=f"engine of {name}", daemon=True
        )
        self._process.start()
        theirs.close()
        for run in self._read, self._write:
            threading.Thread(target=run, name=f"pipe of {name}", daemon=True).start()

    @classmethod
    async def start(cls, name: str, config: EngineConfig) -> "EngineClient":
        """Start the process and load the model.  Raises ModelLoadError with the reason."""
        client = cls(name, config)
        try:
            tokenizer = asyncio.to_thread(load_tokenizer_only, name, config.trust_remote_code)
            client.tokenizer, client.facts = await asyncio.gather(tokenizer, client._ready)
        except BaseException:
            await client.stop()
            raise
        return client

    @asynccontextmanager
    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        checkpoints: Sequence[int] = (),
        on_update: Callable[[Generation, float], None] | None = None,
    ) -> AsyncIterator[Generation]:
        """A request that the engine has accepted; leaving the block ends it.

        on_update: see Generation.
        Raises RequestError if the engine refuses, EngineLost if it has ended.
        """
        add = Add(request_id, prompt_token_ids, params, priority, tuple(checkpoints))
        generation = Generation(add, self.tokenizer, on_update)
        if self.ended.is_set():
            raise EngineLost("the engine's process has ended")
        self.generations[request_id] = generation
        self._added[request_id] = added = self._loop.create_future()
        self._outbox.put(add)
        try:
            await added
            yield generation
        finally:
            self._added.pop(request_id, None)
            if self.generations.pop(request_id, None) is not None and not generation.finished:
                self._outbox.put(Abort(request_id))

    async def call(self, name: str, *arguments: Any) -> Any:
        """Run one of `process.CALLS` between two steps.  Raises EngineLost."""
        if self.ended.is_set():
            raise EngineLost("the engine's process has ended")
        call_id = next(self._call_ids)
        self._calls[call_id] = future = self._loop.create_future()
        self._outbox.put(Call(call_id, name, arguments))
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def stop(self) -> None:
        """End the process; requests that still run fail."""
        self._outbox.put(Stop())
        await asyncio.to_thread(self._process.join, _STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        await self.ended.wait()

    # Threads

    def _read(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            try:
                while True:
                    self._loop.call_soon_threadsafe(self._take, self._pipe.recv())
            except (EOFError, OSError):
                self._process.join()
                self._loop.call_soon_threadsafe(self._end)

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._pipe.send(message)

    # In the event loop

    def _take(self, message: Any) -> None:
        if isinstance(message, Stepped):
            self.metrics = message.metrics or self.metrics
            for update in message.updates:
                generation = self.generations.get(update.request_id)
                if generation is not None:
                    generation.take(update)
        elif isinstance(message, Added):
            if future := self._waiting(self._added, message.request_id):
                future.set_result(None)
        elif isinstance(message, Refused):
            if future := self._waiting(self._added, message.request_id):
                self.generations.pop(message.request_id).fail(RequestError(message.message))
                future.set_exception(RequestError(message.message))
        elif isinstance(message, Returned):
            if future := self._waiting(self._calls, message.call_id):
                if message.error is None:
                    future.set_result(message.value)
                else:
                    future.set_exception(RuntimeError(message.error))
        elif isinstance(message, Lost):
            self._lose(message.message)
        elif isinstance(message, Seen):
            self.on_seen(message.text)
        elif isinstance(message, Log):
            logger.log(message.level, message.message, extra={"transient": message.transient})
        elif isinstance(message, Ready):
            self._ready.set_result(message.facts)
        elif isinstance(message, Failed):
            self._ready.set_exception(ModelLoadError(message.message))

    @staticmethod
    def _waiting(futures: dict[Any, asyncio.Future[Any]], key: Any) -> asyncio.Future[Any] | None:
        """The future that somebody still waits for."""
        future = futures.get(key)
        return None if future is None or future.done() else future

    def _lose(self, message: str) -> None:
        for generation in self.generations.values():
            generation.fail(EngineLost(message))
        self.generations.clear()

    def _end(self) -> None:
        """The process has ended: nobody waits for it any longer."""
        code = self._process.exitcode
        message = f"the engine's process has ended (exit code {code})"
        self._outbox.put(None)
        self.ended.set()
        self._lose(message)
        if not self._ready.done():
            self._ready.set_exception(ModelLoadError(message))
        for futures in self._added, self._calls:
            for future in list(futures.values()):
                if not future.done():
                    future.set_exception(EngineLost(message))
