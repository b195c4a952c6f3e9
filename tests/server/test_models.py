"""Several models within a budget of memory: which are loaded, and when."""

import asyncio
import random
from contextlib import asynccontextmanager
from math import inf
from unittest.mock import patch

import pytest

from vllm_metal_lite import EngineConfig, backend
from vllm_metal_lite.errors import BusyError, ConfigError, ModelLoadError
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.models import Models
from vllm_metal_lite.server.served_model import ModelSpec
from vllm_metal_lite.server.settings import ServerConfig

GIB = 2**30


class FakeEngine:
    facts = None

    def __init__(self, world: "World", source: str, size: float) -> None:
        self.world, self.source, self.size = world, source, size
        self.ended = asyncio.Event()
        self.why_ended, self.num_unfinished, self.not_finite = None, 0, False

    async def stop(self) -> None:
        await asyncio.sleep(0)
        self.end("stopped")

    def end(self, why: str) -> None:
        if not self.ended.is_set():
            self.why_ended = why
            self.world.alive.remove(self)
            self.ended.set()


class World:
    """Starts fake engines, and checks that they fit into memory.

    weights: GiB of each source's weight files.  failing: why a source does not load.  broken: why
    its files cannot be.  stuck: sources whose load never ends.  took: seconds of a load.
    """

    def __init__(self, memory: float = 10, **weights: float) -> None:
        self.memory, self.weights = memory, weights
        self.alive: list[FakeEngine] = []
        self.started: list[str] = []
        self.failing: dict[str, str] = {}
        self.broken: dict[str, str] = {}
        self.stuck: set[str] = set()
        self.now, self.took = 0.0, 0.0
        self.loading: list[float] = []  # sizes
        self.hold, self.end = asyncio.Event(), asyncio.Event()  # a start may continue, may end
        self.hold.set()
        self.end.set()

    def models(
        self,
        *specs: str,
        pinned: str = "",
        budget: float | None = None,
        idle_unload: float | None = None,
    ) -> Models:
        chosen = [ModelSpec(name, name, name in pinned) for name in specs]
        config = ServerConfig(memory_budget_gib=budget, idle_unload=idle_unload)
        with patch.object(backend, "memory_limit", lambda: int(self.memory * GIB)):
            return FakeModels(self, chosen, EngineConfig(memory_fraction=1), config)

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    async def start(
        self, source: str, configure, check: EngineConfig | None, on_progress
    ) -> FakeEngine:
        size = 0.0
        try:
            await asyncio.sleep(0)
            if check is not None and source in self.broken:
                raise ModelLoadError(self.broken[source])
            config = await configure(int(self.weights.get(source, 0) * GIB))
            size = config.memory_fraction * self.memory
            self.loading.append(size)
            used = sum(self.loading) + sum(e.size for e in self.alive)
            assert used <= self.memory + 1e-6, "too much is loaded"
            await self.hold.wait()
            if source in self.stuck:
                await asyncio.Event().wait()
            if source in self.failing:
                raise ModelLoadError(self.failing[source])
            self.now += self.took
            engine = FakeEngine(self, source, size)
            self.alive.append(engine)
            self.started.append(source)
            return engine
        finally:
            await self.end.wait()
            if size:
                self.loading.remove(size)


class FakeModels(Models):
    def __init__(self, world: World, *args) -> None:
        super().__init__(*args)
        self._start, self._clock = world.start, world.clock


def two_with_room_for_one() -> tuple[World, Models]:
    world = World(memory=10, a=7, b=7)
    return world, world.models("a", "b")


def state_of(models: Models, name: str) -> tuple[str, str | None]:
    model = models.by_name[name]
    return model.state, model.error


@asynccontextmanager
async def held(models: Models, name: str):
    async with models.use(name) as (_, engine):
        assert not engine.ended.is_set()
        yield engine


async def once(models: Models, name: str) -> FakeEngine:
    async with held(models, name) as engine:
        return engine


async def asked_for(models: Models, name: str) -> asyncio.Future[FakeEngine]:
    """A request that has come as far as it can."""
    request = asyncio.ensure_future(once(models, name))
    await settle()
    return request


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_model_alone_gets_the_whole_budget():
    world = World()
    models = world.models("a", budget=8)
    await models.start()
    assert [e.size for e in world.alive] == [8]
    assert (await once(models, "")) is (await once(models, "a"))
    await models.stop()
    assert world.alive == []


async def test_the_first_and_the_pinned_are_loaded_from_the_start():
    world = World(c=1)
    models = world.models("a", "b", "c", pinned="c")
    await models.start()
    assert world.started == ["a", "c"]
    assert [m.state for m in models.by_name.values()] == ["loaded", "unloaded", "loaded"]
    assert list(models.loaded) == ["a", "c"]


async def test_the_least_recently_used_makes_room():
    world = World(memory=10)
    models = world.models("a", "b", "c", "d", "e")
    world.weights = dict.fromkeys("abcde", 1.6)  # 3 GiB each
    for name in "abcad":
        await once(models, name)
    assert sorted(models.loaded) == ["a", "c", "d"]
    await once(models, "b")
    assert sorted(models.loaded) == ["a", "b", "d"]


async def test_an_idle_model_makes_room_before_a_busy_one():
    world = World(memory=10, a=2, b=2, c=2)  # room for two
    models = world.models("a", "b", "c")
    async with held(models, "a"):
        await once(models, "b")
        await asyncio.wait_for(once(models, "c"), 30)
    assert list(models.loaded) == ["a", "c"]


async def test_a_model_in_use_stays_until_its_requests_end_and_gets_no_new_ones():
    world, models = two_with_room_for_one()
    async with held(models, "a") as first:
        b = await asked_for(models, "b")
        assert not b.done()
        assert models.by_name["b"].state == "loading"
        again = await asked_for(models, "a")
        assert not again.done()  # or b would wait for ever
    await b
    assert first.ended.is_set()
    assert (await again) is not first
    assert world.started == ["a", "b", "a"]


async def test_a_model_whose_files_are_broken_takes_no_room():
    world, models = two_with_room_for_one()
    world.broken["b"] = "its weights are cut"
    async with held(models, "a") as first:
        for _ in range(3):
            with pytest.raises(ApiError, match="its weights are cut"):
                await once(models, "b")
            world.now += 6
            assert await once(models, "a") is first
    assert world.started == ["a"]
    assert (models.by_name["b"].state, list(models.loaded)) == ("failed", ["a"])


async def test_a_model_that_fails_once_it_has_room_rarely_takes_it_again():
    world, models = two_with_room_for_one()
    world.failing["b"] = "the trial failed"
    for _ in range(120):  # ten minutes of requests for both
        await once(models, "a")
        with pytest.raises(ApiError, match="the trial failed") as failure:
            await once(models, "b")
        assert 1 <= int(failure.value.headers["Retry-After"]) <= 60
        assert state_of(models, "b") == ("failed", "the trial failed")
        world.now += 5
    assert world.started == ["a"] * 11  # at the start, and after a failure a minute
    world.failing.clear()
    world.now += 60
    await once(models, "b")


async def test_requests_that_wait_are_answered_together_and_no_model_waits_for_ever():
    """Six clients, three a model, each with ten requests, one after the other."""
    world, models = two_with_room_for_one()

    async def client(name: str) -> None:
        for _ in range(10):
            async with models.use(name):
                for _ in range(5):
                    await asyncio.sleep(0)
            await asyncio.sleep(0)  # a client thinks, and no request holds the model

    await asyncio.wait_for(asyncio.gather(*(client(name) for name in "ababab")), 10)
    assert world.started == ["a", "b"] * (len(world.started) // 2)
    assert len(world.started) <= 2 * 10


async def test_models_load_in_the_order_of_their_first_requests():
    """There is room for one.  Requests for `a` overlap without end, and more come for `b`."""
    world = World(memory=10, a=7, b=7, c=7)
    models = world.models("a", "b", "c")
    waiting = []
    async with held(models, "a"):
        for name in "bcbacb":
            waiting.append(await asked_for(models, name))
    await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert world.started == ["a", "b", "c", "a"]


async def test_who_waits_and_leaves_costs_nothing():
    world, models = two_with_room_for_one()
    async with held(models, "a") as first:
        b = await asked_for(models, "b")
        a = await asked_for(models, "a")
        b.cancel()
        assert await asyncio.wait_for(a, 30) is first
    assert world.started == ["a"]
    assert models.by_name["b"].state == "unloaded"


async def test_who_asks_while_an_unwanted_start_ends_gets_the_model():
    world, models = two_with_room_for_one()
    async with held(models, "a"):
        world.end.clear()
        left = await asked_for(models, "b")
        left.cancel()
        await settle()
        asked = await asked_for(models, "b")
        world.end.set()
        await settle()
    assert (await asked) is models.by_name["b"].client


async def test_who_leaves_while_a_model_loads_leaves_it_loaded():
    world = World()
    models = world.models("a")
    world.hold.clear()
    waiting = await asked_for(models, "a")
    waiting.cancel()
    await settle()
    world.hold.set()
    await settle()
    engine = models.by_name["a"].engine
    assert engine is not None
    assert engine.users == 0


async def test_a_load_that_never_ends_keeps_no_other_model_from_loading():
    world = World(memory=10, a=1, b=1, c=1)
    models = world.models("a", "b", "c")
    await models.start()
    world.stuck.add("b")
    waits = await asked_for(models, "b")
    assert state_of(models, "b") == ("loading", None)
    await asyncio.wait_for(once(models, "c"), 10)
    assert not waits.done()
    await models.stop()
    with pytest.raises(ApiError, match="shutting down"):
        await waits


async def test_a_load_without_requests_ends_and_frees_its_memory():
    world, models = two_with_room_for_one()
    models.unwanted_seconds = 0.001
    await models.start()
    world.stuck.add("b")
    waits = await asked_for(models, "b")
    assert (world.loading, world.alive) == ([9.75], [])
    back = await asked_for(models, "a")  # no room: b might still come
    assert not back.done()
    waits.cancel()
    assert await asyncio.wait_for(back, 10) is world.alive[0]
    assert state_of(models, "b")[0] == "unloaded"
    assert world.loading == []


async def test_many_wait_for_one_load_but_no_more_than_may_run_or_wait():
    world = World()
    models = world.models("a")
    world.hold.clear()
    waiting = [asyncio.ensure_future(once(models, "a")) for _ in range(64 + 256)]
    await settle()
    with pytest.raises(BusyError, match=r"320 requests run or wait, and max_waiting is 256"):
        await asyncio.wait_for(once(models, "a"), 0.1)
    world.hold.set()
    assert len(set(await asyncio.gather(*waiting))) == 1
    assert world.started == ["a"]


async def test_a_failure_is_told_and_tried_again_later():
    world = World()
    models = world.models("a", "b")
    world.failing["b"] = "the weights are broken"
    with pytest.raises(ApiError, match=r"`b` cannot be loaded: the weights are broken") as failure:
        await once(models, "b")
    assert failure.value.status == 503
    assert failure.value.headers["Retry-After"] == "5"
    assert state_of(models, "b") == ("failed", "the weights are broken")
    world.failing.clear()
    with pytest.raises(ApiError, match="broken"):
        await once(models, "b")
    world.now += 5
    await once(models, "b")
    assert state_of(models, "b") == ("loaded", None)


async def test_the_first_model_has_to_load():
    world = World()
    world.failing["a"] = "no such folder"
    with pytest.raises(ModelLoadError, match="no such folder"):
        await world.models("a").start()


async def test_a_model_that_never_fits_beside_the_pinned_ones():
    world = World(memory=10, a=6, b=3)
    models = world.models("a", "b", pinned="a")
    await models.start()
    with pytest.raises(ApiError, match=r"b needs 5.0 GiB .* leave 1.5 GiB of 10.0 GiB") as refusal:
        await once(models, "b")
    assert refusal.value.status == 503
    assert list(models.loaded) == ["a"]


async def test_an_engine_that_ended_is_loaded_again():
    world, models = two_with_room_for_one()
    async with held(models, "a") as engine:
        engine.end("the engine's process has ended by SIGKILL")
        assert models.by_name["a"].state == "failed"
        assert "SIGKILL" in models.by_name["a"].error
        assert models.loaded == {}
        async with held(models, "a") as other:
            assert other is not engine
    engine = await once(models, "a")
    engine.end("gone")
    await once(models, "b")
    assert world.started == ["a", "a", "b"]


async def test_a_stop_ends_those_that_load_and_those_that_wait():
    world, models = two_with_room_for_one()
    async with held(models, "a"):
        waiting = await asked_for(models, "b")
        await models.stop()
        with pytest.raises(ApiError, match="shutting down"):
            await waiting
    assert world.alive == []


async def test_an_unknown_model_is_404():
    models = World().models("a", "b")
    with pytest.raises(ApiError, match=r"`c` does not exist; the models are: a, b\.") as unknown:
        await once(models, "c")
    assert unknown.value.status == 404


async def test_a_budget_beyond_the_device_is_refused():
    with pytest.raises(ConfigError, match=r"memory_budget_gib is 11.0 GiB; this device has 10.0"):
        World(memory=10).models("a", budget=11)


async def test_two_clients_that_alternate_between_two_models_do_not_load_one_for_each_request():
    """There is room for one.  A load takes 4 s; each client has ten requests, of 0.1 s."""
    world, models = two_with_room_for_one()
    world.took = 4
    left = dict.fromkeys("ab", 10)

    async def client(name: str) -> None:
        for _ in range(10):
            async with models.use(name):
                await settle()
                world.now += 0.1
            left[name] -= 1
            await settle()  # the client thinks

    clients = [asyncio.ensure_future(client(name)) for name in "ab"]
    while all(left.values()):
        world.now += 0.02
        await settle()
        models._changed.set()  # as the timer of a stay does
    world.now += 100
    models._changed.set()
    await asyncio.wait_for(asyncio.gather(*clients), 10)
    assert world.started == ["a", "b"]


async def test_a_model_stays_for_as_long_as_its_load_took_but_not_for_long():
    world, models = two_with_room_for_one()
    for took, stays in (4, 4), (1000, models.longest_stay):
        world.took, world.started = took, []
        await once(models, "a")
        world.took = 0
        waits = await asked_for(models, "b")
        world.now += stays - 1
        models._changed.set()
        await settle()
        assert (world.started, await once(models, "a")) == (["a"], models.by_name["a"].client)
        world.now += 2
        models._changed.set()
        assert (await waits).source == "b"
        world.now += 1


async def test_a_model_leaves_after_a_while_without_requests_and_comes_back():
    world = World()
    models = world.models("a", "b", pinned="b", idle_unload=0.0001)  # 6 ms
    await models.start()
    async with held(models, "a") as first:
        await asyncio.sleep(0.05)
        assert not first.ended.is_set()  # it is in use
    await asyncio.wait_for(first.ended.wait(), 10)
    await settle()
    assert state_of(models, "a") == ("unloaded", None)
    assert [engine.source for engine in world.alive] == ["b"]  # the pinned model stays
    assert await once(models, "a") is not first


async def test_a_request_says_how_long_its_model_stays():
    """0: it leaves with its last request; infinity: it stays; the latest request counts."""
    world = World()
    models = world.models("a", idle_unload=0.0001)
    async with held(models, "a") as first, models.use("a", 0):
        pass
    await asyncio.wait_for(first.ended.wait(), 10)
    async with models.use("a", inf) as (_, second):
        pass
    await asyncio.sleep(0.05)
    assert await once(models, "a") is second  # without a word of its own
    await asyncio.sleep(0.05)
    async with models.use("a", 0):
        pass
    await asyncio.wait_for(second.ended.wait(), 10)


async def test_a_client_unloads_a_model_once_its_requests_have_ended():
    world = World()
    models = world.models("a", "b", pinned="b")
    await models.start()
    async with held(models, "a") as first:
        unloading = asyncio.ensure_future(models.unload("a"))
        await settle()
        assert not first.ended.is_set()
        again = await asked_for(models, "a")
        assert not again.done()  # it waits for the next load
    assert (await unloading).spec.name == "a"
    assert await again is not first
    with pytest.raises(ApiError, match="pinned"):
        await models.unload("b")
    with pytest.raises(ApiError, match="`c` does not exist"):
        await models.unload("c")
    for _ in range(2):  # also if it is not loaded
        assert (await models.unload(None)).state == "unloaded"


async def test_an_unload_that_nobody_waits_for_undoes_itself_alone():
    """Two unloads wait for the requests of a model, and the first one is given up."""
    world = World()
    models = world.models("a")
    async with held(models, "a") as first:
        given_up, kept = (asyncio.ensure_future(models.unload("a")) for _ in range(2))
        await settle()
        given_up.cancel()
        await settle()
        again = await asked_for(models, "a")
        assert not again.done()
    await kept
    assert await again is not first


@pytest.mark.parametrize("seed", range(12))
async def test_at_random_nobody_waits_for_ever_and_memory_suffices(seed):
    """Requests of all models (some leave early), unloads, engines that end, loads that fail."""
    rng = random.Random(seed)
    names = "abcdef"
    world = World(memory=16)
    world.weights = {name: rng.choice([0, 1, 3, 6, 8]) for name in names}
    models = world.models(*names, pinned="a" if seed % 2 else "")
    world.took = seed % 3 / 100
    served, refused = [], []

    async def request() -> None:
        name = rng.choice(names)
        try:
            async with models.use(name, rng.choice([None, inf, 0, 0.001])) as (spec, engine):
                assert spec.name == name
                assert engine.source == name
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(0)
                    assert not engine.ended.is_set() or engine.why_ended == "crash"
                served.append(name)
                if rng.random() < 0.05:
                    engine.end("crash")
        except ApiError as e:
            refused.append(e.status)
            world.now += 6

    async def unload(name: str) -> None:
        if not models.by_name[name].spec.pinned:
            await models.unload(name)

    tasks = []
    for _ in range(300):
        tasks.append(asyncio.ensure_future(request()))
        if rng.random() < 0.2:
            rng.choice(tasks).cancel()
        if rng.random() < 0.1:
            name = rng.choice(names)
            tasks.append(asyncio.ensure_future(unload(name)))
        if rng.random() < 0.05:
            name = rng.choice(names)
            world.failing = {} if world.failing else {name: "bad luck"}
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert not [t for t in tasks if not t.cancelled() and t.exception()]
    await settle()
    assert served
    assert set(refused) <= {503}
    for model in models.by_name.values():
        assert not model.num_waiting
        assert not model.is_loading
        assert model.engine is None or (model.engine.users, model.engine.leaves) == (0, False)
    await models.stop()
    assert world.alive == []
