"""The engine's process: reads messages between steps, runs steps, reports what is new.

The process ends when the server says so, or when the server ends.
"""

import gc
import logging
import os
import time
from collections.abc import Hashable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.describe import describe
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.engine.intake import constraint_of
from vllm_metal_lite.engine.step_loop import run_steps
from vllm_metal_lite.errors import BusyError, MetalLiteError, ModelLoadError, RequestError, one_line
from vllm_metal_lite.images.eyes import Eyes
from vllm_metal_lite.model.files.find import find
from vllm_metal_lite.model.files.folder import weight_files
from vllm_metal_lite.model.loader import preview
from vllm_metal_lite.outputs import RequestOutput
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput
from vllm_metal_lite.server.model_text import ModelFacts
from vllm_metal_lite.server.offload import GRAMMARS
from vllm_metal_lite.server.output import never_waiting
from vllm_metal_lite.server.worker.messages import FACTS, FILES, Add, EngineLost, Sent
from vllm_metal_lite.server.worker.progress import Progress
from vllm_metal_lite.server.worker.watch import Watcher

logger = logging.getLogger(__name__)

_METRICS_SECONDS = 0.5  # between metrics, while steps run
_REST_SECONDS = 2.0  # for the work of `rest` before the end; less than link.STOP_SECONDS


def main(pipe: Connection, name: str, check: EngineConfig | None) -> None:
    """Find or download a model, build its engine, and serve until the pipe closes.

    check: see `EngineClient.start`.
    This process downloads, because a download can only be ended with its process.
    """
    Thread(target=_end_with_server, name="the server", daemon=True).start()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    package = logging.getLogger("vllm_metal_lite")
    server = Caller(pipe)
    package.addHandler(server)
    package.setLevel(logging.INFO)
    with never_waiting(), suppress(EOFError, OSError):  # the server is gone
        try:
            logger.info("finding the model's files", extra={"transient": True})
            path = find(name)
            if check is not None:
                preview(path, name, check.dtype, check.trust_remote_code)
            weight_bytes = sum(file.stat().st_size for file in weight_files(path))
            server.call("replied", FILES, (str(path), weight_bytes))
            engine = LLMEngine.from_name(name, pipe.recv())
        except Exception as e:
            why = f"{name}: the engine does not start: {one_line(e)}"
            parts = e.parts if isinstance(e, MetalLiteError) else (why,)
            server.call("failed", [FILES, FACTS], ModelLoadError(*parts))
            return
        gc.collect()  # as in the server's own process (lifecycle.py)
        gc.freeze()
        server.call("replied", FACTS, facts_of(engine))
        Worker(engine, pipe, server).run()
        engine.runner.synchronize()  # the device may still compute a step


def _end_with_server() -> None:
    """End this process as soon as the server has ended, whatever this process does."""
    server = parent_process()
    assert server is not None, "an engine's process is started by a server"
    server.join()
    os._exit(1)


class Caller(logging.Handler):
    """Calls methods of the EngineClient at the other end of a pipe, from any thread.  As a handler
    of the package's log it sends the lines to the server, which shows them."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe, self._sending = pipe, Lock()

    def call(self, method: str, *args: Any) -> None:
        """Raises OSError if the server is gone."""
        with self._sending:
            self._pipe.send((method, args))

    def emit(self, record: logging.LogRecord) -> None:
        transient = bool(getattr(record, "transient", False))
        with suppress(OSError):
            self.call("logged", record.levelno, self.format(record), transient)


class Worker:
    """Runs an engine for the server at the other end of a pipe."""

    def __init__(self, engine: LLMEngine, pipe: Connection, server: Caller) -> None:
        self._engine, self._pipe, self._server = engine, pipe, server
        self._progress: dict[str, Progress] = {}  # unfinished, by request id
        self._grammars: dict[str, Future[Any]] = {}  # of requests that `add` is to queue
        self._metrics_at, self._sent = 0.0, Sent()
        self._watcher = Watcher(engine)
        self._is_stopped = False
        engine.on_step = self._on_step

    def run(self) -> None:
        """Serve until `stop`.  EOFError if the server is gone, SystemExit if the device is."""
        self._report([])  # the first metrics
        run_steps(
            self._engine,
            has_call=self._pipe.poll,
            take_call=self._take_call,
            deliver=self._deliver,
            fail=self._fail,
        )
        until = time.monotonic() + _REST_SECONDS
        while not self._engine.has_unfinished_requests() and time.monotonic() < until:
            if not self._engine.rest():  # all that waited is on the prefix disk
                break

    def _take_call(self) -> bool:
        while not self._pipe.poll(self._watcher.wait()):
            self._show()
        method, args = self._pipe.recv()
        self._watcher.changed()
        getattr(self, method)(*args)
        return not self._is_stopped

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        self._report(outputs)
        if self._watcher.wait() == 0:
            self._show()

    # What the server calls

    def add(self, add: Add) -> None:
        """Queue a request."""
        engine, request_id = self._engine, add.request_id
        prompt = {
            "prompt_token_ids": add.prompt_token_ids,
            "cache_salt": add.cache_salt,
            "multi_modal_data": {"image": self._sent.unpacked(add.pictures)},
        }
        try:
            order = {"priority": add.priority, "fair_round": add.fair_round}
            engine.add_request(request_id, prompt, add.params, checkpoints=add.checkpoints, **order)
        except Exception as e:
            self._refuse(request_id, e)
        else:
            self._grammars.pop(request_id, None)
            self._progress[request_id] = Progress(bool(add.sampling.stop_strings))
            self._server.call("replied", request_id)

    def compile(self, request_id: str, params: SamplingParams, client: Hashable) -> None:
        """Make the grammar of a request on a thread; `add`, which follows if that succeeds, finds
        it made.  Clients take turns."""

        def reply(made: Future[Any]) -> None:
            with suppress(OSError, CancelledError):  # the server or the client is gone
                if (e := made.exception()) is not None:
                    self._refuse(request_id, e)
                else:
                    self._server.call("replied", request_id)

        work = partial(constraint_of, params, self._engine.model)
        self._grammars[request_id] = made = GRAMMARS.submit(client, work).result
        made.add_done_callback(reply)

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored.  A request that runs ends with an update."""
        if made := self._grammars.pop(request_id, None):
            made.cancel()
        self._report(self._engine.abort(request_id))

    def watch(self, seconds: float) -> None:
        """Show what happens from time to time, for this time; a later call extends it."""
        self._watcher.watch(seconds)

    def stop(self) -> None:
        """End the process after the current step."""
        self._is_stopped = True

    # News for the server

    def _refuse(self, request_id: str, e: BaseException) -> None:
        if not isinstance(e, MetalLiteError):
            logger.error("a request cannot be added", exc_info=e)
            e = EngineLost(f"the engine failed: {one_line(e)}")
        elif not isinstance(e, BusyError):
            e = RequestError(*e.parts)
        self._grammars.pop(request_id, None)
        self._server.call("failed", [request_id], e)

    def _fail(self, lost: list[str], e: Exception) -> None:
        """End the requests at fault for a failed step; SystemExit if no step succeeds."""
        if lost:
            for request_id in lost:
                self._progress.pop(request_id, None)
            why = f"a step of the engine failed: {one_line(e)}"
            self._server.call("failed", lost, EngineLost(why))
        if self._engine.failed_steps.is_hopeless:
            logger.error("several steps failed one after the other, so the engine ends")
            raise SystemExit(1) from e

    def _show(self) -> None:
        self._server.call("on_event", self._watcher.event())

    def _on_step(self, output: SchedulerOutput) -> None:
        self._watcher.on_step(output)
        for request in output.admitted:
            progress = self._progress.get(request.parent_id)
            if progress is not None and progress.scheduled_at is None:
                progress.scheduled_at = output.launched_at

    def _report(self, outputs: list[RequestOutput]) -> None:
        updates = {}
        for output in outputs:
            request_id = output.request_id
            progress = self._progress[request_id]
            if progress.is_new:
                self._server.call("prefilled", request_id, *progress.prefill(output))
            updates[request_id] = progress.news(output)
            if output.finished:
                del self._progress[request_id]
        now = time.monotonic()
        if now - self._metrics_at > _METRICS_SECONDS or not self._progress:
            self._metrics_at = now
            self._server.call("measured", self._engine.metrics())
        if updates:
            self._server.call("stepped", updates)


def facts_of(engine: LLMEngine) -> ModelFacts:
    """The facts of an engine for the server."""
    model, config = engine.model, engine.config
    return ModelFacts(
        name=model.name,
        model_type=model.model_type,
        max_model_len=engine.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults=model.sampling_defaults,
        uses_checkpoints=engine.scheduler.kv.uses_checkpoints,
        block_size=config.block_size,
        num_blocks=engine.kv_groups[0].num_blocks,
        max_num_seqs=config.max_num_seqs,
        attention=engine.runner.attention.name,
        attention_reason=engine.runner.path.reason,
        weight_bytes=model.weight_bytes,
        store_bytes=engine.runner.attention.store.nbytes,
        description=tuple(describe(engine)),
        pooling=model.pooling,
        no_pictures=None if isinstance(engine.eyes, Eyes) else engine.eyes.reason,
        max_pictures=config.limit_mm_per_prompt["image"],
    )
