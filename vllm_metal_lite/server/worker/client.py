"""Starts an engine's process, sends it requests, and gives its updates to their RequestStates."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.images.eyes import Processor
from vllm_metal_lite.model.files.tokenizer import load_tokenizer_only
from vllm_metal_lite.server.model_text import ModelFacts, ModelText
from vllm_metal_lite.server.offload import REQUESTER, offload
from vllm_metal_lite.server.worker import link
from vllm_metal_lite.server.worker.fair_rounds import FairRounds
from vllm_metal_lite.server.worker.messages import FACTS, FILES, Add, Delta, EngineLost, Sent
from vllm_metal_lite.server.worker.request_state import RequestState

logger = logging.getLogger("vllm_metal_lite")

_STUCK_SECONDS = 120.0  # a longer silence while requests run is an error; compiling takes a minute


class EngineClient:
    """An engine in a process of its own.  Only one event loop may use the client.

    metrics: the latest `LLMEngine.metrics()`, at most half a second old while steps run.
    pid: the id of the process.  why_ended: the reason in one line, once `ended` is set.
    first_token_seconds: how long the first answer's first token took.
    """

    model: ModelText

    def __init__(
        self, name: str, check: EngineConfig | None, on_progress: Callable[[str], None]
    ) -> None:
        """Start the process.  `start` also loads the model, and explains the arguments."""
        self._on_progress = on_progress
        self.first_token_seconds: float | None = None
        self.metrics: dict[str, int] = {}
        self.on_event: Callable[[str], None] = lambda event: None
        self.requests: dict[str, RequestState] = {}  # unfinished, by request id
        self._num_answers = 0  # the answers of `requests`
        self.num_preparing = 0  # requests whose prompts and grammars the server makes
        self.not_finite = False  # the model has computed NaN or infinity for a request
        self.ended = asyncio.Event()  # the process has ended
        self.why_ended: str | None = None
        self._fair, self._sent, self._is_stopping = FairRounds(), Sent(), False
        self._heard_at = time.monotonic()  # the last message, or the first request after a pause
        self._replies: dict[str, asyncio.Future[Any]] = {}  # by request id, FILES or FACTS
        self._files, self._facts = self._reply(FILES), self._reply(FACTS)
        self._link = link.Link(name, check, self._take, self._end)
        self.pid = self._link.pid

    @classmethod
    async def start(
        cls,
        name: str,
        configure: Callable[[int], Awaitable[EngineConfig]],
        check: EngineConfig | None,
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> "EngineClient":
        """Start the process and load the model.  Raises ModelLoadError with the reason.

        configure: a function that gets the size of the weight files in bytes, once they are on this
        machine, and returns the options.
        check: options with which a first look, without weights, tells whether the model can load.
        on_progress: a function that gets each line of progress.
        """
        client = cls(name, check, on_progress)
        try:
            path, weight_bytes = await client._files
            config = await configure(weight_bytes)
            client._link.send(config)
            loading = offload(load_tokenizer_only, path, config.trust_remote_code)
            tokenizer, facts = await asyncio.gather(loading, client._facts)
            sees = facts.no_pictures is None
            processor = await offload(Processor.of_folder, Path(path)) if sees else None
            client.model = ModelText(facts, tokenizer, processor)
            await offload(lambda: client.model.longest_token)
        except BaseException as e:
            client._is_stopping = True
            client._link.kill()  # the process holds nothing yet that needs a proper end
            await client.ended.wait()
            if isinstance(e, EngineLost):
                raise ModelLoadError(str(e)) from None
            raise
        return client

    @property
    def facts(self) -> ModelFacts:
        return self.model.facts

    @property
    def num_unfinished(self) -> int:
        """Answers that run, wait or are being prepared."""
        return self.num_preparing + self._num_answers

    @property
    def is_stuck(self) -> bool:
        """Whether requests run, and the process has said nothing for a long time."""
        return bool(self.requests) and time.monotonic() - self._heard_at > _STUCK_SECONDS

    @asynccontextmanager
    async def generate(
        self, add: Add, on_update: Callable[[RequestState, float], None] | None = None
    ) -> AsyncIterator[RequestState]:
        """Yields a request that the engine has accepted.  Leaving the block ends the request.

        on_update: see RequestState.
        Raises RequestError if the engine refuses, EngineLost if it has ended.
        """
        client = REQUESTER.get().client
        fair_round = self._fair.next_round(client)
        add, request_id = replace(add, fair_round=fair_round), add.request_id
        request = RequestState(add, self.model.tokenizer, on_update)
        if not self.requests:
            self._heard_at = time.monotonic()
        self.requests[request_id] = request
        self._num_answers += request.params.n
        try:
            if add.sampling.structured_outputs is not None:
                await self._accepted(request_id, "compile", request_id, add.sampling, client)
            add = replace(add, pictures=self._sent.packed(add.pictures))
            await self._accepted(request_id, "add", add)
            yield request
        finally:
            self._replies.pop(request_id, None)
            self._drop(request_id)
            if not request.finished:
                self.call("abort", request_id)

    async def _accepted(self, request_id: str, method: str, *args: Any) -> None:
        """Call a method of the Worker, and wait for its reply.  Raises EngineLost."""
        if self.why_ended is not None:
            raise EngineLost(self.why_ended)
        reply = self._reply(request_id)
        self.call(method, *args)
        await reply

    def watch(self, seconds: float, on_event: Callable[[str], None]) -> None:
        """Have `on_event` get the JSON of `watch.py` from time to time, for the next `seconds`."""
        self.on_event = on_event
        self.call("watch", seconds)

    async def stop(self) -> None:
        """End the process; requests that still run fail."""
        self._is_stopping = True
        self.call("stop")
        try:
            await asyncio.wait_for(self.ended.wait(), link.STOP_SECONDS)
        except TimeoutError:
            self._link.kill()
            await self.ended.wait()

    def call(self, method: str, *args: Any) -> None:
        """Have the process call a method of its Worker."""
        self._link.send((method, args))

    def _drop(self, request_id: str) -> RequestState | None:
        """Forget a request that ends, unless it is forgotten already."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._num_answers -= request.params.n
            self._fair.end(request.fair_round)
        return request

    def _reply(self, key: str) -> asyncio.Future[Any]:
        self._replies[key] = reply = asyncio.get_running_loop().create_future()
        return reply

    # The process calls the methods below.

    def _take(self, message: tuple[str, tuple[Any, ...]]) -> None:
        self._heard_at = time.monotonic()
        method, args = message
        getattr(self, method)(*args)

    def replied(self, key: str, value: Any = None) -> None:
        """Answer a call.

        key: the id of a request that is queued or whose grammar is made, or FILES or FACTS.
        """
        reply = self._replies.pop(key, None)
        if reply is not None and not reply.done():  # done: no caller waits any longer
            reply.set_result(value)

    def failed(self, keys: Iterable[str], error: Exception) -> None:
        """End requests, or the start, with an error.  keys: as in `replied`."""
        for key in keys:
            if request := self._drop(key):
                request.fail(error)
            reply = self._replies.pop(key, None)
            if reply is not None and not reply.done():
                reply.set_exception(error)
                reply.exception()  # if no caller waits for the reply, asyncio must not warn

    def prefilled(self, request_id: str, *prefill: Any) -> None:
        """Record the results of a request's prompt.  Comes before the request's first deltas.

        prefill: the arguments of `RequestState.prefilled`.
        """
        if (request := self.requests.get(request_id)) is not None:
            request.prefilled(*prefill)

    def stepped(self, news: dict[str, list[Delta]]) -> None:
        """Record the deltas of a step.  news: by request id."""
        for request_id, deltas in news.items():
            request = self.requests.get(request_id)
            if request is not None:
                request.take(deltas)
                if self.first_token_seconds is None and (at := request.times.first_token):
                    self.first_token_seconds = round(at - request.times.arrived, 3)
                if request.finished:
                    self.not_finite |= request.not_finite
                    self._drop(request_id)

    def measured(self, metrics: dict[str, int]) -> None:
        self.metrics = metrics

    def logged(self, level: int, message: str, transient: bool) -> None:
        """Log a record of the process.  transient: the record is progress, not for log files."""
        if transient:
            self._on_progress(message)
        logger.log(level, message, extra={"transient": transient})

    def _end(self, why: str) -> None:
        """The process has ended."""
        lost = len(self.requests)
        self.why_ended = why
        self.ended.set()
        self.failed([*self.requests, *self._replies], EngineLost(why))
        if not self._is_stopping:
            logger.error(f"{why}; {lost} requests failed; the next request starts a new engine")
