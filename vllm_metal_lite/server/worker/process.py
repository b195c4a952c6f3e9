"""The engine's process: reads messages between steps, runs steps, reports what is new.

The process ends when the server says so, or when the server ends.
"""

import logging
import os
import time
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.describe import describe
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.engine.intake import constraint_of
from vllm_metal_lite.errors import MetalLiteError, one_line
from vllm_metal_lite.model.files import find
from vllm_metal_lite.model.loader import preview
from vllm_metal_lite.outputs import Cursor, RequestOutput
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput
from vllm_metal_lite.server.worker.messages import (
    Abort,
    Accepted,
    Add,
    AnswerUpdate,
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
    to_wire,
)
from vllm_metal_lite.server.worker.watch import Watcher

logger = logging.getLogger(__name__)

_METRICS_SECONDS = 0.5  # between metrics, while steps run


def main(pipe: Connection, name: str, check: EngineConfig | None) -> None:
    """Find or download a model, build its engine, and serve until the pipe closes.

    check: see `EngineClient.start`.
    This process downloads, because a download can only be ended with its process.
    """
    Thread(target=_end_with_server, name="the server", daemon=True).start()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    package = logging.getLogger("vllm_metal_lite")
    sender = Sender(pipe)
    package.addHandler(ToServer(sender))
    package.setLevel(logging.INFO)
    with suppress(EOFError, OSError):  # the server is gone
        try:
            path = find(name)
            if check is not None:
                preview(path, name, check.dtype, check.trust_remote_code)
            weight_bytes = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
            sender.send(ModelFiles(str(path), weight_bytes))
            engine = LLMEngine.from_name(name, pipe.recv())
        except MetalLiteError as e:
            sender.send(Failed(e.parts))
            return
        except Exception as e:
            sender.send(Failed((f"{name}: the engine does not start: {one_line(e)}",)))
            return
        sender.send(facts_of(engine))
        Worker(engine, pipe, sender).run()
        engine.runner.synchronize()  # the device may still compute a step


def _end_with_server() -> None:
    """End this process as soon as the server has ended, whatever this process does."""
    server = parent_process()
    assert server is not None, "an engine's process is started by a server"
    server.join()
    os._exit(1)


class Sender:
    """The way to the server, for all threads."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, Lock()

    def send(self, message: Any) -> None:
        """Raises OSError if the server is gone."""
        with self._lock:
            self._pipe.send(message)


class Worker:
    """Runs an engine for the server at the other end of a pipe."""

    def __init__(self, engine: LLMEngine, pipe: Connection, sender: Sender) -> None:
        self._engine, self._pipe, self._send = engine, pipe, sender.send
        self._progress: dict[str, _Progress] = {}  # unfinished, by request id
        self._metrics_at = 0.0
        self._watcher = Watcher(engine)
        engine.on_step = self._see

    def run(self) -> None:
        """Serve until Stop.  EOFError if the server is gone, SystemExit if the device is."""
        engine = self._engine
        self._report([])  # the first metrics
        while True:
            while not engine.has_unfinished_requests() or self._pipe.poll():
                while engine.rest() and not self._pipe.poll():
                    pass
                while not self._pipe.poll(self._watcher.wait()):
                    self._send(WatcherEvent(self._watcher.event()))
                message = self._pipe.recv()
                if isinstance(message, Stop):
                    return
                self._take(message)
            try:
                outputs = engine.step()
            except Exception as e:
                self._fail(e)
                continue
            self._report(outputs)
            if self._watcher.wait() == 0:
                self._send(WatcherEvent(self._watcher.event()))

    def _fail(self, e: Exception) -> None:
        """End the requests at fault for a failed step; SystemExit if no step succeeds."""
        why = f"a step of the engine failed: {one_line(e)}"
        logger.warning(why)
        if lost := self._engine.requests_at_fault:
            self._engine.abort(lost)
            for request_id in lost:
                self._progress.pop(request_id, None)
            self._send(Lost(why, lost))
        if self._engine.failed_steps.is_hopeless:
            logger.error("several steps failed one after the other, so the engine ends")
            raise SystemExit(1) from e
        self._report([])

    def _take(self, message: Any) -> None:
        self._watcher.changed()
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            self._report(self._engine.abort(message.request_id))
        elif isinstance(message, Watch):
            self._watcher.watch(message.seconds)
        elif isinstance(message, Compile):
            # On a thread: it takes long, and touches nothing that steps do.
            Thread(target=self._compile, args=[message], daemon=True).start()

    def _compile(self, message: Compile) -> None:
        with suppress(Exception):  # `Add` says why a grammar cannot be used
            constraint_of(message.params, self._engine.model)
        with suppress(OSError):  # the server is gone
            self._send(Accepted(message.request_id))

    def _add(self, message: Add) -> None:
        engine, request_id = self._engine, message.request_id
        prompt = {"prompt_token_ids": message.prompt_token_ids, "cache_salt": message.cache_salt}
        try:
            engine.add_request(
                request_id, prompt, message.params,
                priority=message.priority, fair_round=message.fair_round,
                checkpoints=message.checkpoints,
            )  # fmt: skip
        except MetalLiteError as e:
            self._send(Lost(str(e), [request_id], is_refused=True))
        except Exception as e:
            logger.exception("a request cannot be added")
            self._send(Lost(f"the engine failed: {one_line(e)}", [request_id]))
        else:
            self._progress[request_id] = _Progress(bool(message.sampling.stop_strings))
            self._send(Accepted(message.request_id))

    def _see(self, output: SchedulerOutput) -> None:
        self._watcher.saw(output)
        for request in output.admitted:
            progress = self._progress.get(request.request_id.partition("#")[0])
            if progress is not None and progress.scheduled_at is None:
                progress.scheduled_at = output.launched_at

    def _report(self, outputs: list[RequestOutput]) -> None:
        updates = {}
        for output in outputs:
            updates[output.request_id] = self._progress[output.request_id].news(output)
            if output.finished:
                del self._progress[output.request_id]
        now = time.monotonic()
        if now - self._metrics_at > _METRICS_SECONDS or not self._progress:
            self._metrics_at = now
            self._send(EngineMetrics(self._engine.metrics()))
        if updates:
            self._send(updates)


class _Progress:
    """What the server knows of a request."""

    def __init__(self, sends_text: bool) -> None:
        self.scheduled_at: float | None = None
        self._sends_text = sends_text
        self._unfinished: dict[int, Cursor] | None = None  # by index of the answer

    def news(self, output: RequestOutput) -> list[AnswerUpdate]:
        """What is new since the last call."""
        is_first = self._unfinished is None
        if self._unfinished is None:
            self._unfinished = {answer.index: Cursor(answer) for answer in output.outputs}
        updates = []
        for index, cursor in list(self._unfinished.items()):
            answer, (token_ids, logprobs) = cursor.answer, cursor.tokens()
            if answer.finished:
                del self._unfinished[index]
            elif not token_ids:
                continue
            updates.append(
                AnswerUpdate(
                    index,
                    token_ids,
                    cursor.text() if self._sends_text else None,
                    answer.finish_reason,
                    answer.stop_reason,
                    answer.num_shown_tokens,
                    answer.error,
                    None if logprobs is None else list(map(to_wire, logprobs)),
                )
            )
        if is_first:
            scored = output.prompt_logprobs
            updates[0] = updates[0]._replace(
                scheduled_at=self.scheduled_at,
                num_cached_tokens=output.num_cached_tokens,
                num_restored_tokens=output.num_restored_tokens,
                pooled=output.pooled,
                prompt_logprobs=None
                if scored is None
                else [None if p is None else to_wire(p) for p in scored],
            )
        return updates


class ToServer(logging.Handler):
    """Sends the package's log to the server, which shows it."""

    def __init__(self, sender: Sender) -> None:
        super().__init__()
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        transient = bool(getattr(record, "transient", False))
        with suppress(OSError):
            self._sender.send(Log(record.levelno, record.getMessage(), transient))


def facts_of(engine: LLMEngine) -> ModelFacts:
    """What the server needs to know of an engine."""
    model, config = engine.model, engine.config
    return ModelFacts(
        name=model.name,
        model_type=model.model_type,
        max_model_len=engine.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults=model.sampling_defaults,
        has_states=bool(engine.num_state_slots),
        caches_prefixes=engine.scheduler.config.enable_prefix_caching,
        block_size=config.block_size,
        num_blocks=engine.kv_groups[0].num_blocks,
        max_num_seqs=config.max_num_seqs,
        attention=engine.runner.attention.name,
        attention_reason=engine.attention_reason,
        weight_bytes=model.weight_bytes,
        store_bytes=engine.runner.attention.store.nbytes,
        description=tuple(describe(engine)),
        pooling=model.pooling,
    )
