"""The events that a watched engine makes, and their costs."""

import json

import numpy as np
import pytest

from vllm_metal_lite import EngineConfig, SamplingParams
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.server.worker.watch import Watcher, block_map

MODEL = LLMEngine.from_name("demo", EngineConfig(num_blocks=16)).model


class Clock:
    """Time that passes when it is told to, or a little with every look."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 100.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def watched(clock: Clock | None = None, **config) -> tuple[LLMEngine, Watcher, Clock]:
    clock = clock or Clock()
    config = {"num_blocks": 64, "max_num_seqs": 4, "speculate": "off", **config}
    engine = LLMEngine(MODEL, EngineConfig(**config))
    watcher = Watcher(engine, clock)
    engine.on_step = watcher.on_step
    return engine, watcher, clock


def add(engine: LLMEngine, name: str, prompt: int, max_tokens: int, first: int = 1) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    engine.add_request(name, [first + i % 50 for i in range(prompt)], params)


def codes(blocks: dict) -> list[int]:
    return [code for code, cells in blocks["runs"] for _ in range(cells)]


def run(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def test_nothing_is_recorded_while_nobody_watches():
    engine, watcher, _ = watched()
    add(engine, "a", 40, 4)
    run(engine)
    assert watcher.wait() is None
    assert not watcher._steps


def test_an_event_shows_steps_requests_and_blocks():
    engine, watcher, _ = watched()
    watcher.watch(10)
    add(engine, "a", 40, 4)
    add(engine, "b", 20, 40, first=60)
    while not any(r.request_id == "b" and r.num_tokens > 22 for r in engine.scheduler.running):
        engine.step()
    event = json.loads(watcher.event())
    first = event["steps"][0]
    assert sorted(map(tuple, first["segments"])) == [(1, 40, 0), (2, 20, 0)]
    assert first["decodes"] == 0
    assert event["steps"][1]["decodes"] == 2
    assert [1, 1, 40] in event["steps"][1]["segments"]
    assert event["num_steps"] == len(event["steps"])
    states = {r["n"]: r for r in event["requests"]}
    assert (states[2]["id"], states[2]["state"]) == ("b", "running")
    assert states[2]["prompt"] == 20
    assert states[2]["generated"] > 2
    blocks = event["blocks"]
    assert (blocks["total"], blocks["size"], blocks["per_cell"]) == (64, 16, 1)
    assert sum(cells for _, cells in blocks["runs"]) == 64
    owned = engine.scheduler.running[-1].block_tables[0].owned
    assert [i for i, code in enumerate(codes(blocks)) if code == 2] == sorted(owned)
    run(engine)
    ended = json.loads(watcher.event())
    assert ended["requests"] == []
    assert set(codes(ended["blocks"])) == {0, -1}
    assert codes(ended["blocks"]).count(-1) == engine.metrics()["blocks_cached"]


def test_decodes_with_drafts_are_decodes():
    engine, watcher, _ = watched(speculate="auto")
    watcher.watch(10)
    add(engine, "a", 60, 60)
    run(engine)
    steps = json.loads(watcher.event())["steps"]
    assert engine.metrics()["draft_tokens"] > 0
    assert [step["decodes"] for step in steps] == [0] + [1] * (len(steps) - 1)


def test_shared_blocks_belong_to_no_one_alone():
    engine, _, _ = watched()
    add(engine, "a", 40, 30)
    engine.step()
    add(engine, "b", 40, 30)
    while len(engine.scheduler.running) < 2:
        engine.step()
    found = codes(block_map(engine, engine.scheduler.running))
    assert found.count(-2) == 2  # two whole blocks of the common prompt
    assert {1, 2} < set(found)


def test_preempted_requests_are_named_once():
    engine, watcher, _ = watched(num_blocks=8, enable_prefix_caching=False)
    watcher.watch(1e9)
    add(engine, "a", 20, 100)
    add(engine, "b", 20, 100, first=60)
    named = []
    while engine.has_unfinished_requests():
        engine.step()
        named += json.loads(watcher.event())["preempted"]
    assert engine.metrics()["preemptions"] == len(named) > 0
    assert set(named) == {2}


def test_a_queue_is_shown_up_to_a_hundred():
    engine, watcher, _ = watched(max_num_seqs=1)
    watcher.watch(10)
    for i in range(120):
        add(engine, str(i), 8, 2)
    engine.step()
    event = json.loads(watcher.event())
    assert [r["n"] for r in event["requests"]] == list(range(1, 102))
    assert event["metrics"]["requests_waiting"] == 119


@pytest.mark.parametrize("per_cell", [1, 2, 5])
def test_a_cell_of_a_large_pool_shows_its_highest_block(per_cell):
    num_blocks = 1024 * per_cell - 5
    engine, _, _ = watched(num_blocks=num_blocks)
    engine.scheduler.kv.pools[0]._free.reverse()  # the last blocks are taken first
    add(engine, "a", 40, 30)
    engine.step()
    blocks = block_map(engine, engine.scheduler.running)
    cells = codes(blocks)
    assert blocks["per_cell"] == per_cell
    assert len(cells) == -(-num_blocks // per_cell)
    owned = np.array(engine.scheduler.running[0].block_tables[0].owned)
    assert set(np.flatnonzero(np.array(cells) == 1)) == set(owned // per_cell)


def test_a_map_ends_behind_the_last_block_in_use():
    engine, _, _ = watched(num_blocks=5000)
    assert block_map(engine, [])["mapped"] == 256
    add(engine, "a", 40, 30)
    add(engine, "b", 40, 30)
    engine.step()
    blocks = block_map(engine, engine.scheduler.running)
    assert (blocks["mapped"], blocks["per_cell"], len(codes(blocks))) == (256, 1, 256)
    assert blocks["counts"] == {"owned": 2, "shared": 2, "cached": 0, "free": 4996}
    engine.scheduler.kv.pools[0]._free.reverse()
    add(engine, "c", 40, 30)
    engine.step()
    blocks = block_map(engine, engine.scheduler.running)
    assert (blocks["mapped"], blocks["per_cell"], len(codes(blocks))) == (5000, 5, 1000)
    assert sum(blocks["counts"].values()) == 5000


def test_events_wait_two_hundred_times_their_cost():
    _, watcher, _ = watched(Clock(tick=0.005))
    watcher.watch(1e9)
    watcher.event()
    watcher.changed()
    assert watcher.wait() == pytest.approx(200 * 0.005, abs=0.02)


def test_cheap_events_come_four_times_a_second():
    _, watcher, clock = watched()
    watcher.watch(10)
    assert watcher.wait() == 0
    watcher.event()
    assert watcher.wait() is None  # nothing new
    watcher.changed()
    assert watcher.wait() == 0.25
    clock.now += 0.25
    assert watcher.wait() == 0


def test_a_watch_ends_unless_it_is_renewed():
    engine, watcher, clock = watched()
    watcher.watch(5)
    clock.now += 6
    add(engine, "a", 40, 4)
    run(engine)
    watcher.changed()
    assert watcher.wait() is None
    watcher.watch(5)
    assert watcher.wait() == 0
    assert json.loads(watcher.event())["steps"] == []
