"""A model of the server: its spec, its engine, and whether it is loaded, loading or failed."""

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.errors import NOT_FINITE, BusyError, ModelLoadError
from vllm_metal_lite.model.context import configured_length
from vllm_metal_lite.model.files.find import find
from vllm_metal_lite.model.files.folder import read_json
from vllm_metal_lite.model.files.pooling_config import only_pools
from vllm_metal_lite.server.model_text import ModelFacts
from vllm_metal_lite.server.worker.client import EngineClient


@dataclass(frozen=True)
class ModelSpec:
    """What the user says of a model.

    name: the name that requests use.  source: "demo", a folder or a Hugging Face name.
    pinned: whether the model is loaded from the start and never unloaded.
    chat_format: how the model writes thoughts and calls; if None, a probe of its template decides.
    """

    name: str
    source: str
    pinned: bool = False
    chat_format: ChatFormat | None = None


@dataclass(eq=False)
class LoadedEngine:
    """A model's engine.

    size: the bytes that it may use.  stays_until: the time from which another model may take them.
    idle_seconds: the time without requests after which it leaves.  idle: the timer of that time.
    users: the number of requests that hold it.  leaves: the number of unloads that wait for them.
    """

    client: EngineClient
    size: int
    last_used: float
    stays_until: float
    idle_seconds: float
    idle: asyncio.TimerHandle | None = None
    users: int = 0
    leaves: int = 0

    @property
    def alive(self) -> bool:
        return not self.client.ended.is_set()

    @property
    def takes_requests(self) -> bool:
        return self.alive and not self.leaves


class Model:
    """A model and its state.  `Models` loads and unloads it.

    seats: how many of its requests may run.  max_waiting: how many more may wait.
    """

    WAITING = "waiting for memory"  # the stage of a load

    def __init__(self, spec: ModelSpec, seats: int, max_waiting: int) -> None:
        self.spec, self.seats, self.max_waiting = spec, seats, max_waiting
        self.engine: LoadedEngine | None = None
        self.loading: asyncio.Task[LoadedEngine] | None = None
        self.num_waiting = 0  # requests that wait for `loading`
        self.giving_up: asyncio.TimerHandle | None = None  # ends a load that none waits for
        self.leaving: asyncio.Task[None] | None = None  # the unload after an idle time
        self.reserved = 0  # bytes of memory for the engine that loads
        self.context: int | None = None  # the longest context in tokens, as the model's files say
        self.only_pools = False  # whether it is made for embeddings or scores alone
        self.facts: ModelFacts | None = None  # those of its latest engine
        # When each stage of the latest load began; "": when the load ended.
        self.stages: dict[str, float] = {}
        self.failure: str | None = None  # why the last load failed
        self.retry_at = -inf
        self.made_room = False  # whether its load has unloaded another model

    @property
    def client(self) -> EngineClient | None:
        return self.engine.client if self.engine is not None and self.engine.alive else None

    @property
    def size(self) -> int:
        """The bytes that its engine may use; 0 if there is no engine and none loads."""
        return self.engine.size if self.engine and self.engine.alive else self.reserved

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait, also for the model to load."""
        return self.num_waiting + (0 if self.client is None else self.client.num_unfinished)

    def check_room(self) -> None:
        """Raise BusyError if no further request may wait."""
        if (unfinished := self.num_unfinished) >= self.seats + self.max_waiting:
            why = f"{unfinished} requests run or wait, and max_waiting is {self.max_waiting}"
            raise BusyError(f"the server is busy: {why}")

    @property
    def is_loading(self) -> bool:
        return self.loading is not None and not self.loading.done()

    def begin(self, stage: str) -> None:
        """Note a stage of its load, by the line that reports it.  "": the load has ended."""
        self.stages.setdefault(re.split("[:,]", stage)[0], time.monotonic())

    @property
    def stage(self) -> str:
        return next(reversed(self.stages), "")

    @property
    def waits_for_memory(self) -> bool:
        """Whether its load does."""
        return self.stage == self.WAITING and not self.reserved

    @property
    def stage_seconds(self) -> dict[str, float]:
        """How long each stage of its latest load took, in order."""
        pairs = pairwise(self.stages.items())
        return {stage: round(end - began, 3) for (stage, began), (_, end) in pairs}

    @property
    def progress(self) -> str:
        """What a request for it waits for, in one line."""
        return f"the model {self.spec.name} is {self.state}: {self.stage}"

    @property
    def state(self) -> str:
        """One of "loaded", "loading", "failed" and "unloaded"."""
        if self.client is not None:
            return "loaded"
        if self.is_loading:
            return "loading"
        return "unloaded" if self.error is None else "failed"

    @property
    def error(self) -> str | None:
        """The last fault: a load that failed, an engine that ended, or numbers that are not finite.
        None if nothing has gone wrong since the last load."""
        if self.engine is not None and not self.engine.alive:
            return self.engine.client.why_ended
        if self.engine is not None and self.engine.client.not_finite:
            return f"it computed numbers that are not finite: {NOT_FINITE}"
        return self.failure


def read_files(source: str, max_model_len: int | None) -> tuple[int | None, bool]:
    """Returns a model's longest context, and whether the model makes only embeddings or scores.

    The context is None if the files are not on this machine, or do not name it.
    """
    folder = context = None
    with suppress(ModelLoadError, OSError):
        folder = find(source, download=False)
        file = folder / "config.json"
        config = read_json(file) if file.is_file() else {}  # reading a pipe may never end
        if (length := configured_length(config)) is not None:
            context = min(length, max_model_len or length)
    return context, only_pools(folder, source)
