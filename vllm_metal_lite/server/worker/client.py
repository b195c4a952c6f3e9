"""The server's side of an engine's process.

Two threads move messages through the pipe, so that the event loop never waits for the engine: the
engine's process reads only between steps, and a step of a long prompt can take seconds.
"""

import asyncio
import atexit
import logging
import multiprocessing
import queue
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from multiprocessing import resource_tracker
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.detect import PLAIN, detect
from vllm_metal_lite.chat_formats.grammars import marks_of
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.piece_encoder import PieceEncoder
from vllm_metal_lite.engine.prompt_ids import by_template
from vllm_metal_lite.errors import ModelLoadError, RequestError
from vllm_metal_lite.model.tokenizer import load_tokenizer_only
from vllm_metal_lite.server.fair_rounds import FairRounds
from vllm_metal_lite.server.offload import REQUESTER, offload
from vllm_metal_lite.server.templates import THINKING, Template, probe
from vllm_metal_lite.server.worker import process
from vllm_metal_lite.server.worker.messages import (
    Abort,
    Accepted,
    Add,
    Compile,
    EngineMetrics,
    Failed,
    Log,
    Lost,
    ModelFacts,
    ModelFiles,
    Stop,
    Watch,
    WatcherEvent,
)
from vllm_metal_lite.server.worker.request_state import EngineLost, RequestState

logger = logging.getLogger("vllm_metal_lite")

_STOP_SECONDS = 3  # then the process is killed
_LEAST_COUNTED = 16_384  # tokens of a prompt that are counted in any case


class EngineClient:
    """An engine in a process of its own.  Use from one event loop.

    metrics: the latest `LLMEngine.metrics()`, at most about a second old while steps run.
    pid: the process's id.  why_ended: one line, once `ended` is set.
    on_seen: gets the JSON of `watch.py`, after `watch`.
    """

    facts: ModelFacts
    tokenizer: TokenizerWrapper
    longest_token: int  # length in characters of the longest token's text

    def __init__(self, name: str, check: EngineConfig | None) -> None:
        """Start the process.  `start` also loads the model.  check: see there."""
        self.metrics: dict[str, int] = {}
        self.on_seen: Callable[[str], None] = lambda text: None
        self.requests: dict[str, RequestState] = {}  # unfinished, by request id
        self.num_preparing = 0  # requests whose prompts and grammars the server makes
        self._fair = FairRounds()
        self.ended = asyncio.Event()  # the process has ended
        self.why_ended: str | None = None
        self._is_stopping = False
        self._loop = asyncio.get_running_loop()
        self._found: asyncio.Future[ModelFiles] = self._loop.create_future()
        self._ready: asyncio.Future[ModelFacts] = self._loop.create_future()
        self._accepting: dict[str, asyncio.Future[None]] = {}  # by request id
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=process.main, args=(theirs, name, check), name=f"engine of {name}", daemon=True
        )
        with _signals_blocked():
            self._process.start()
        self.pid = self._process.pid
        # At its exit Python sends SIGTERM to processes that still run, and waits for them.
        atexit.register(self._kill)
        theirs.close()
        self._writer = threading.Thread(target=self._write, name=f"to {name}", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name=f"from {name}", daemon=True).start()

    @classmethod
    async def start(
        cls,
        name: str,
        configure: Callable[[int], Awaitable[EngineConfig]],
        check: EngineConfig | None,
    ) -> "EngineClient":
        """Start the process and load the model.  Raises ModelLoadError with the reason.

        configure: gets the size of the weight files in bytes, once they are on this machine.
        check: find out first, without weights, whether the model can be loaded with these options.
        """
        client = cls(name, check)
        try:
            found = await client._found
            config = await configure(found.weight_bytes)
            client._outbox.put(config)
            tokenizer = offload(load_tokenizer_only, found.path, config.trust_remote_code)
            client.tokenizer, client.facts = await asyncio.gather(tokenizer, client._ready)
            longest = offload(lambda: max(map(len, client.tokenizer.get_vocab())))
            client.longest_token = await longest
        except BaseException:
            client._is_stopping = True
            client._kill()  # it holds nothing yet that is worth a proper end
            await client.ended.wait()
            raise
        return client

    @property
    def num_unfinished(self) -> int:
        """Answers that run, wait or are being prepared."""
        return self.num_preparing + sum(g.params.n for g in self.requests.values())

    @property
    def max_prompt_tokens(self) -> int:
        """Counting the tokens of a prompt stops here."""
        return max(2 * self.facts.max_model_len, _LEAST_COUNTED)

    @property
    def max_characters(self) -> int:
        """A longer prompt does not fit, whatever its text."""
        return self.max_prompt_tokens * self.longest_token

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How the model writes thoughts and calls.  Found by a probe, in milliseconds."""
        tokenizer = self.tokenizer
        if not tokenizer.has_chat_template:
            return PLAIN

        def render(messages: Any, tools: Any, generation: bool) -> str:
            return by_template(tokenizer, messages, generation, {"tools": tools})

        template = tokenizer.chat_template
        return detect(template if isinstance(template, str) else "", render, self.grammar_tokens)

    @cached_property
    def thinks(self) -> bool:
        """Whether the chat template knows of thoughts."""
        template, end = self.tokenizer.chat_template, self.chat_format.think_end
        return bool(end) and isinstance(template, str) and end in template

    @property
    def can_think(self) -> bool:
        """Whether the chat template marks thoughts, or has a variable for them."""
        return self.thinks or bool(self.template.variables & THINKING)

    @cached_property
    def encode_text(self) -> PieceEncoder:
        """Makes token ids of texts that repeat those before, as turns of a conversation do."""
        return PieceEncoder(self.tokenizer)

    @cached_property
    def template(self) -> Template:
        """What the chat template takes.  Found by a probe, in milliseconds."""
        return probe(self.tokenizer)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokenizer's special tokens, by their text."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        tokenizer = self.tokenizer
        named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        return {token.content: i for i, token in added.items() if token.special} | dict(named)

    @cached_property
    def grammar_tokens(self) -> dict[str, int]:
        """Ids of the tokens that a grammar must name by id."""
        return marks_of(self.tokenizer) | self.special_tokens

    @asynccontextmanager
    async def generate(
        self, add: Add, on_update: Callable[[RequestState, float], None] | None = None
    ) -> AsyncIterator[RequestState]:
        """Yields an accepted request, in its fair round.  Leaving the block ends the request.

        on_update: see RequestState.
        Raises RequestError if the engine refuses, EngineLost if it has ended.
        """
        fair_round = self._fair.next_round(
            REQUESTER.get().client, (r.fair_round for r in self.requests.values())
        )
        add, request_id = replace(add, fair_round=fair_round), add.request_id
        request = RequestState(add, self.tokenizer, on_update)
        self.requests[request_id] = request
        try:
            if add.sampling.structured_outputs is not None:
                await self._accepted(Compile(request_id, add.sampling))
            await self._accepted(add)
            yield request
        finally:
            self._accepting.pop(request_id, None)
            self.requests.pop(request_id, None)
            if not request.finished:
                self._outbox.put(Abort(request_id))

    async def _accepted(self, message: Add | Compile) -> None:
        """Send a message, and wait for its answer.  Raises EngineLost."""
        if self.why_ended is not None:
            raise EngineLost(self.why_ended)
        self._accepting[message.request_id] = future = self._loop.create_future()
        self._outbox.put(message)
        await future

    def watch(self, seconds: float) -> None:
        """Have `on_seen` called from time to time, for the next `seconds`."""
        self._outbox.put(Watch(seconds))

    async def stop(self) -> None:
        """End the process; requests that still run fail."""
        self._is_stopping = True
        self._outbox.put(Stop())
        try:
            await asyncio.wait_for(self.ended.wait(), _STOP_SECONDS)
        except TimeoutError:
            self._kill()
            await self.ended.wait()

    def _kill(self) -> None:
        with suppress(ValueError):  # it has ended
            self._process.kill()

    # Threads

    def _read(self) -> None:
        try:
            while True:
                self._post(self._take, self._pipe.recv())
        except (EOFError, OSError):
            pass  # the process has ended
        except Exception:
            logger.exception("a message of the engine's process cannot be read")
        # Only this thread waits for the process: two would take the exit code from each other.
        self._process.join(_STOP_SECONDS)
        self._process.kill()
        self._process.join()
        atexit.unregister(self._kill)
        why = _why_ended(self._process.exitcode)
        self._outbox.put(None)
        self._writer.join()
        self._pipe.close()
        self._process.close()
        self._post(self._end, why)

    def _post(self, call: Callable[[Any], None], argument: Any) -> None:
        """Call in the event loop, unless it is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, argument)

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._pipe.send(message)
        except OSError:
            pass  # the process has ended
        except Exception:
            logger.exception("a message to the engine's process cannot be sent")
            self._kill()  # or later messages would wait forever

    # In the event loop

    def _take(self, message: Any) -> None:
        if isinstance(message, dict):  # a step's updates, by request id
            for request_id, updates in message.items():
                request = self.requests.get(request_id)
                if request is not None:
                    request.take(updates)
                    if request.finished:
                        del self.requests[request_id]
        elif isinstance(message, EngineMetrics):
            self.metrics = message.values
        elif isinstance(message, Accepted):
            if future := self._waiting(message.request_id):
                future.set_result(None)
        elif isinstance(message, Lost):
            error = RequestError if message.is_refused else EngineLost
            self._fail(message.request_ids, error(message.message))
        elif isinstance(message, WatcherEvent):
            self.on_seen(message.text)
        elif isinstance(message, Log):
            logger.log(message.level, message.message, extra={"transient": message.transient})
        elif isinstance(message, ModelFiles):
            if not self._found.done():  # as it is if the start was cancelled
                self._found.set_result(message)
        elif isinstance(message, ModelFacts):
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Failed):
            self._fail_start(ModelLoadError(*message.parts))

    def _waiting(self, request_id: str) -> asyncio.Future[None] | None:
        """The future of a request that is not accepted yet, if a caller still waits for it."""
        future = self._accepting.get(request_id)
        return None if future is None or future.done() else future

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        for request_id in request_ids:
            if request := self.requests.pop(request_id, None):
                request.fail(error)
            if future := self._waiting(request_id):
                future.set_exception(error)

    def _fail_start(self, error: ModelLoadError) -> None:
        futures: tuple[asyncio.Future[Any], ...] = (self._found, self._ready)
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # perhaps no caller waits for it

    def _end(self, why: str) -> None:
        """The process has ended, and no caller waits for it."""
        if not self._is_stopping:
            lost = len(self.requests)
            logger.error(f"{why}; {lost} requests failed; the next request starts a new engine")
        self.why_ended = why
        self.ended.set()
        self._fail(list(self.requests), EngineLost(why))
        self._fail_start(ModelLoadError(why))


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes that start here never get SIGINT and SIGTERM.

    Ctrl-C in a terminal and a service manager's SIGTERM reach all processes of the server, and the
    server decides when an engine ends.
    """
    resource_tracker.ensure_running()  # whose start would let SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _why_ended(exit_code: int | None) -> str:
    how = f"with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            how = f"by {signal.Signals(-exit_code).name}"
    return f"the engine's process has ended {how}"
