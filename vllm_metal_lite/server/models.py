"""The models that a server has, by name, within a budget of memory.

The first model and the pinned ones are loaded at the start, others when a request names them:

    unloaded --> loading --> loaded --> leaving --> unloaded
                    |                      |
                    +--> failed            +--> loaded, if the other model is no longer wanted

- loading: the requests for the model wait.  Models load beside each other.  Only one at a time
  takes its memory, in the order of the first requests: it waits for its turn, then until enough
  models have left, and then has its memory reserved.  A load that no request waits for ends: at
  once while it waits for memory, otherwise after a minute.
- leaving: another model needs the memory, no request came for a while, or a client asked for it.
  For another one, idle models leave before busy ones, and the least recently used first; each stays
  for as long as its load took, at most `longest_stay`, so that models that are used in turns do not
  only load.  A model that leaves takes no further requests, and is unloaded when its last one has
  ended.  New requests for it wait for its next load, so no model waits forever.
- failed: requests get the reason, until the time of the next try.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from vllm_metal_lite import backend
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import ModelLoadError, Option, one_line, shorten, size_text
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.memory import memory_budget, share
from vllm_metal_lite.server.offload import offload
from vllm_metal_lite.server.served_model import LoadedEngine, Model, ModelSpec, read_files
from vllm_metal_lite.server.settings import ServerConfig
from vllm_metal_lite.server.worker.client import EngineClient

logger = logging.getLogger(__name__)

# Seconds from a failed load to the next try: usually, and if other models were unloaded for it.
_RETRY, _RETRY_WITH_ROOM = 5.0, 60.0


class Models:
    """Loads and unloads models, and hands out their engines.  Use from one event loop.

    Raises ConfigError if the budget of memory exceeds the device's.
    """

    # How long a load continues after the last request that waited for it has left.
    unwanted_seconds = 60.0
    longest_stay = 10.0
    _start = staticmethod(EngineClient.start)
    _clock = staticmethod(time.monotonic)

    def __init__(
        self, specs: list[ModelSpec], config: EngineConfig, server_config: ServerConfig
    ) -> None:
        self.config = config
        self._idle_seconds = 60 * (server_config.idle_unload or math.inf)
        seats, max_waiting = config.max_num_seqs, server_config.max_waiting
        self.by_name = {spec.name: Model(spec, seats, max_waiting) for spec in specs}
        self._memory = backend.memory_limit()
        self.budget = memory_budget(config, server_config.memory_budget_gib)
        self._taking_memory = asyncio.Lock()
        # Set when a request has left an engine or waits no more, and when a load has ended.
        self._changed = asyncio.Event()
        self._has_started = False

    @property
    def loaded(self) -> dict[str, EngineClient]:
        """The engines that run, by the model's name."""
        return {name: client for name, model in self.by_name.items() if (client := model.client)}

    async def start(self) -> None:
        """Load the first model and the pinned ones.  Raises ModelLoadError."""
        for i, model in enumerate(self.by_name.values()):
            reading = offload(read_files, model.spec.source, self.config.max_model_len)
            model.context, model.only_pools = await reading
            if i == 0 or model.spec.pinned:
                self._count(model, await self._acquire(model), -1)
        self._has_started = True

    async def stop(self) -> None:
        """End all engines, also those that are being loaded."""
        tasks = [model.loading for model in self.by_name.values() if model.loading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(client.stop() for client in self.loaded.values()))

    @asynccontextmanager
    async def use(
        self, name: str | None, idle_seconds: float | None = None
    ) -> AsyncIterator[tuple[ModelSpec, EngineClient]]:
        """The engine of a model, loaded; the model stays loaded inside of the block.

        If name is None or empty, this is the first model.  idle_seconds: the new time without
        requests after which the engine leaves.  Raises ApiError with 404 for an unknown name and
        with 503 for a model that does not load; BusyError if no further request may wait.
        """
        model = self.find(name)
        try:
            engine = await self._acquire(model)
        except ModelLoadError as e:
            why = f"The model `{model.spec.name}` cannot be loaded: {e}"
            wait = {"Retry-After": str(round(max(model.retry_at - self._clock(), 1)))}
            raise ApiError(503, why, code="model_not_loaded", headers=wait) from e
        if idle_seconds is not None:
            engine.idle_seconds = idle_seconds
        try:
            yield model.spec, engine.client
        finally:
            self._count(model, engine, -1)

    async def unload(self, name: str | None) -> Model:
        """Unload a model once its requests have ended; nothing happens if it is not loaded.

        Raises ApiError with 404 for an unknown name and with 409 for a pinned model.
        """
        model = self.find(name)
        if model.spec.pinned:
            why = f"The model `{model.spec.name}` is pinned: it stays loaded."
            raise ApiError(409, why, param="model")
        if model.engine is not None and model.engine.alive:
            await self._unload(model, model.engine, "a client asked for it")
        return model

    def find(self, name: str | None) -> Model:
        """Raises ApiError (404) for an unknown name."""
        name = name or next(iter(self.by_name))
        if name not in self.by_name:
            known = ", ".join(self.by_name)
            why = f"The model `{shorten(name)}` does not exist; the models are: {known}."
            raise ApiError(404, why, param="model", code="model_not_found")
        return self.by_name[name]

    async def _acquire(self, model: Model) -> LoadedEngine:
        """A model's engine, with the caller as a user; loads the model if necessary."""
        engine = model.engine
        if engine is not None and engine.takes_requests:
            self._count(model, engine, 1)
            return engine
        if model.failure is not None and self._clock() < model.retry_at:
            raise ModelLoadError(model.failure)
        model.check_room()
        while model.loading is not None and model.is_loading and model.loading.cancelling():
            await asyncio.wait([model.loading])
        if not model.is_loading:
            model.loading = asyncio.ensure_future(self._load(model))
            model.loading.add_done_callback(self._load_ended)
        loading = model.loading
        assert loading is not None
        model.num_waiting += 1
        if model.giving_up is not None:
            model.giving_up.cancel()
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if loading.done() and not loading.cancelled() and loading.exception() is None:
                self._count(model, loading.result(), -1)
            raise
        finally:
            model.num_waiting -= 1
            self._changed.set()
            if not (model.num_waiting or loading.done()):
                seconds = 0 if model.waits_for_memory else self.unwanted_seconds
                loop = asyncio.get_running_loop()
                model.giving_up = loop.call_later(seconds, loading.cancel)

    def _load_ended(self, loading: asyncio.Task[LoadedEngine]) -> None:
        if not loading.cancelled():
            loading.exception()  # marks it as read: perhaps no request waits for this load
        self._changed.set()

    def _count(self, model: Model, engine: LoadedEngine, users: int) -> None:
        """Add users of an engine, or subtract them.  Without users it leaves after idle_seconds."""
        engine.users += users
        engine.last_used = self._clock()
        if engine.idle is not None:
            engine.idle.cancel()
        seconds = engine.idle_seconds
        if not (engine.users or model.spec.pinned or seconds == math.inf):
            loop = asyncio.get_running_loop()
            engine.idle = loop.call_later(seconds, self._leave, model, engine, seconds)
        self._changed.set()

    def _leave(self, model: Model, engine: LoadedEngine, seconds: float) -> None:
        if engine.takes_requests:
            unloading = self._unload(model, engine, f"no request for {seconds:g} s")
            model.leaving = asyncio.ensure_future(unloading)

    # Load and unload

    async def _load(self, model: Model) -> LoadedEngine:
        """Load a model for the requests that wait for it, which become users of its engine."""
        try:
            while model.engine is None or not model.engine.takes_requests:
                if model.client is not None:  # it leaves
                    await self._change()
                else:
                    await self._start_engine(model)
        except asyncio.CancelledError:
            why = "the server is shutting down, or no request waited for the model"
            raise ModelLoadError(why) from None
        except Exception as e:
            parts = e.parts if isinstance(e, ModelLoadError) else (one_line(e),)
            # The budget sets this option of each engine.
            budget = Option("memory_budget_gib")
            error = ModelLoadError(*(budget if p == "memory_fraction" else p for p in parts))
            model.engine, model.failure = None, str(error)
            model.retry_at = self._clock() + (_RETRY_WITH_ROOM if model.made_room else _RETRY)
            if self._has_started:  # the caller of `start` reports its failure
                logger.warning(f"the model {model.spec.name} cannot be loaded: {error}")
            raise error from e
        assert model.engine is not None
        # Users from here on: the next load must not take the engine away.
        self._count(model, model.engine, model.num_waiting)
        return model.engine

    async def _start_engine(self, model: Model) -> None:
        began, model.made_room, model.stages = 0.0, False, {}
        model.begin("starting a process")

        async def configure(weight_bytes: int) -> EngineConfig:
            nonlocal began
            size = share(self.budget, len(self.by_name), weight_bytes)
            model.begin(model.WAITING)
            async with self._taking_memory:
                await self._make_room(model, size)
                model.reserved = size
            began = self._clock()
            return replace(self.config, memory_fraction=min(size / self._memory, 1))

        # A model that cannot be loaded must not take the room of one that works.
        check = self.config if len(self.by_name) > 1 else None
        try:
            client = await self._start(model.spec.source, configure, check, model.begin)
            model.begin("")
            now, size = self._clock(), model.reserved
            stays_until = now + min(now - began, self.longest_stay)
            model.engine = LoadedEngine(client, size, now, stays_until, self._idle_seconds)
            model.failure, model.facts = None, client.facts
        finally:
            model.reserved = 0
        if model.spec.chat_format is not None:
            client.model.chat_format = model.spec.chat_format
        took, room = f"{now - began:.1f} s", size_text(size)
        self._log(f"the model {model.spec.name} is loaded, in {took}; it may use {room} of memory")

    async def _make_room(self, model: Model, size: int) -> None:
        """Unload models until `size` bytes are free.

        Raises ModelLoadError if the pinned models leave less.
        """
        models = self.by_name.values()
        most = self.budget - sum(m.size for m in models if m.spec.pinned)
        if size > most:
            raise ModelLoadError(
                f"{model.spec.name} needs {size_text(size)} of memory, and the pinned models leave "
                f"{size_text(most)} of {size_text(self.budget)}"
            )
        while (missing := size - self.budget + sum(m.size for m in models)) > 0:
            others = {m: m.engine for m in models if m.engine and m.client and not m.spec.pinned}
            if sum(engine.size for engine in others.values()) < missing:  # another model loads
                await self._change()
                continue
            victim = min(others, key=lambda m: (others[m].users > 0, others[m].last_used))
            if (left := others[victim].stays_until - self._clock()) > 0:
                await self._change(left)
                continue
            await self._unload(victim, others[victim], f"{model.spec.name} needs its room")
            model.made_room = True

    async def _unload(self, model: Model, engine: LoadedEngine, why: str) -> None:
        """Unload a model once its requests have ended; it stays if this is cancelled before."""
        engine.leaves += 1
        try:
            while engine.alive and engine.users:
                await self._change()
        except asyncio.CancelledError:
            engine.leaves -= 1
            self._changed.set()
            raise
        self._log(f"the model {model.spec.name} is unloaded: {why}")
        # `_stop` continues if this task is cancelled.
        await asyncio.shield(self._stop(model, engine))

    async def _stop(self, model: Model, engine: LoadedEngine) -> None:
        await engine.client.stop()
        if model.engine is engine:  # two unloads may wait for one engine
            model.engine = None
        self._changed.set()

    async def _change(self, seconds: float | None = None) -> None:
        """Wait until a request comes or leaves or a load ends.  seconds: the longest wait."""
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def _log(self, text: str) -> None:
        """Log a line, which the command line prints where there are several models."""
        logger.info(text, extra={"shown": len(self.by_name) > 1})
