"""The engine in a thread of its own: MLX runs there, streams are read here."""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from tests.support.engine.faults import PLACES, decodes_from, spoil
from tests.support.models import tiny_models as tiny
from tests.support.models.tiny_models import greedy
from tests.support.run_python import run_python
from vllm_metal_lite.engine.async_engine import AsyncEngine
from vllm_metal_lite.engine.failed_steps import MAX_FAILURES
from vllm_metal_lite.errors import RequestError, SamplingError
from vllm_metal_lite.sampling_params import SamplingParams

PROMPTS = tiny.prompts(12, 3, 40, seed=31)
SAFETY = 600  # seconds after which a run hangs, however busy the machine is


def expected(i: int, n: int = 12, name: str = "llama") -> list[int]:
    return tiny.alone(tiny.native(name), PROMPTS[i], n)


@contextmanager
def served(name: str = "llama", **options) -> Iterator[AsyncEngine]:
    """A served engine, whose thread stops whatever happens."""
    engine = AsyncEngine(tiny.engine(name, **options))
    try:
        yield engine
    finally:
        engine.shutdown()
        assert not engine._thread.is_alive()


@pytest.fixture
def engine():
    with served() as engine:
        yield engine


async def collect(engine: AsyncEngine, prompt, params, **how) -> list[int]:
    """The tokens of a stream, which must only ever grow."""
    tokens: list[int] = []
    async for output in engine.generate(prompt, params, **how):
        now = list(output.outputs[0].token_ids)
        assert now[: len(tokens)] == tokens
        tokens = now
    assert output.finished
    return tokens


async def idle(engine: AsyncEngine) -> dict[str, int]:
    """Wait until nothing runs, and return the metrics; fails if blocks are never given back."""
    deadline = time.monotonic() + SAFETY / 2
    while time.monotonic() < deadline:
        metrics = await engine.metrics()
        if not (metrics["requests_running"] or metrics["requests_waiting"]):
            assert metrics["blocks_owned"] == 0
            assert not engine._streams
            return metrics
        await asyncio.sleep(0.01)
    raise AssertionError(metrics)


@pytest.mark.parametrize("name", ["llama", "llama/llama3_rope", "gpt_oss", "mixtral"])
async def test_many_streams_at_once_equal_the_model_alone(name):
    """A fresh model, so that whatever MLX left unevaluated was made in another thread."""
    tiny._packed.cache_clear()
    with served(name, num_blocks=24, max_model_len=100, max_num_seqs=5) as engine:
        streams = [collect(engine, p, greedy()) for p in PROMPTS]
        results = await asyncio.gather(*streams)
        assert results == [expected(i, name=name) for i in range(len(PROMPTS))]
        await idle(engine)


async def test_sampled_streams_equal_the_synchronous_engine(engine):
    params = [SamplingParams(seed=i, max_tokens=10, top_p=0.9) for i in range(len(PROMPTS))]
    plain = tiny.answers(tiny.engine(), PROMPTS, params)
    streams = [collect(engine, p, q) for p, q in zip(PROMPTS, params, strict=True)]
    assert await asyncio.gather(*streams) == plain


async def test_leaving_a_stream_gives_its_blocks_back(engine):
    stream = engine.generate(PROMPTS[0], greedy(80))
    async for output in stream:
        if len(output.outputs[0].token_ids) >= 3:
            break
    await stream.aclose()
    metrics = await idle(engine)
    assert metrics["decode_tokens"] < 79
    assert await collect(engine, PROMPTS[1], greedy()) == expected(1)


async def held(engine: AsyncEngine) -> threading.Event:
    """Have the engine's thread wait for the event that is returned."""
    waits, go = threading.Event(), threading.Event()
    engine._submit(lambda: (waits.set(), go.wait(SAFETY)))
    await asyncio.to_thread(waits.wait, SAFETY)
    return go


async def stopping(engine: AsyncEngine) -> asyncio.Task:
    """Begin a shutdown, in a thread of its own."""
    task = asyncio.create_task(asyncio.to_thread(engine.shutdown))
    while not engine._closed:
        await asyncio.sleep(0)
    return task


def hold(engine: AsyncEngine, after: int) -> tuple[threading.Event, threading.Event]:
    """The engine's thread waits before a step, when `after` steps are done: it sets the first
    event, and continues at the second."""
    held, go = threading.Event(), threading.Event()
    step, steps = engine._engine.step, itertools.count()

    def held_step():
        if next(steps) == after:
            held.set()
            go.wait(SAFETY)
        return step()

    engine._engine.step = held_step
    return held, go


@pytest.mark.parametrize("after", [None, 0, 1, 20])
async def test_a_cancelled_task_gives_its_blocks_back(engine, after):
    """Also when it is cancelled before the engine's thread has even seen it."""
    waits, go = hold(engine, after or 0)
    other = asyncio.create_task(collect(engine, PROMPTS[2], greedy(30)))
    tasks = [asyncio.create_task(collect(engine, p, greedy(80))) for p in PROMPTS[3:6]]
    await (asyncio.sleep(0) if after is None else asyncio.to_thread(waits.wait, SAFETY))
    for task in tasks:
        task.cancel()
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results)
    assert await other == expected(2, 30)
    await idle(engine)


async def test_abort_ends_the_stream_where_it_stands(engine):
    tokens, reason = [], None
    async for output in engine.generate(PROMPTS[0], greedy(80), "mine"):
        tokens = list(output.outputs[0].token_ids)
        reason = output.outputs[0].finish_reason
        if len(tokens) == 2:
            await engine.abort("mine")
    assert reason == "abort"
    assert tokens == expected(0, 80)[: len(tokens)]
    await engine.abort("mine")  # ended already: nothing happens
    await engine.abort("nobody")
    await idle(engine)


async def test_a_refused_request_raises_in_its_own_stream_only(engine):
    good = asyncio.create_task(collect(engine, PROMPTS[0], greedy(30), request_id="good"))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="empty"):
        await collect(engine, [], greedy())
    with pytest.raises(RequestError, match="outside the vocabulary"):
        await collect(engine, [999], greedy())
    with pytest.raises(SamplingError, match="logit_bias"):
        await collect(engine, [1], SamplingParams(logit_bias={999: 1.0}))
    with pytest.raises(RequestError, match="already in use"):
        await collect(engine, PROMPTS[1], greedy(), request_id="good")
    assert await good == expected(0, 30)


@pytest.mark.parametrize("place", PLACES)
async def test_a_request_that_fails_when_it_decodes_harms_no_other_request(engine, place):
    spoil(engine._engine, {"0": (decodes_from(3), place)})
    streams = [collect(engine, p, greedy(), request_id=str(i)) for i, p in enumerate(PROMPTS)]
    bad, *results = await asyncio.gather(*streams, return_exceptions=True)
    assert str(bad) == "the forward failed"
    assert results == [expected(i) for i in range(1, len(PROMPTS))]
    await idle(engine)


async def test_an_engine_whose_steps_all_fail_ends_all_streams():
    with served(max_num_seqs=4) as engine:
        runner, steps = engine._engine.runner, itertools.count(1)
        execute = runner.execute
        go = await held(engine)
        tasks = [asyncio.ensure_future(collect(engine, p, greedy())) for p in PROMPTS]
        runner.execute = Mock(side_effect=(RuntimeError(f"the device is gone, {i}") for i in steps))
        await asyncio.sleep(0)  # all of them are in
        go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {str(r) for r in results} <= {
            f"the device is gone, {i}" for i in range(1, MAX_FAILURES + 1)
        }
        runner.execute = execute
        assert await collect(engine, PROMPTS[1], greedy()) == expected(1)
        await idle(engine)


async def test_a_step_whose_tokens_cannot_be_recorded_ends_its_own_streams():
    with served(max_num_seqs=2) as engine:

        def fail(output):
            if len(engine._streams) == 3:
                engine._engine.on_step = None
                raise RuntimeError("a bug")

        engine._engine.on_step = fail
        streams = [collect(engine, p, greedy(20)) for p in PROMPTS[:3]]
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert [str(r) for r in results[:2]] == ["a bug"] * 2
        assert results[2] == expected(2, 20)
        await idle(engine)


async def test_a_stream_whose_last_step_cannot_be_recorded_does_not_wait_forever(engine):
    engine._engine.on_step = Mock(side_effect=RuntimeError("a bug"))
    for _ in range(MAX_FAILURES):
        with pytest.raises(RuntimeError, match="a bug"):
            await collect(engine, PROMPTS[0], greedy(1))
    await idle(engine)


async def test_an_error_of_work_in_a_pause_ends_nothing(engine):
    engine._engine.prefix_disk.rest = rest = Mock(side_effect=OSError("the disk"))
    for i in range(2):
        assert await collect(engine, PROMPTS[i], greedy(12)) == expected(i)
        while rest.call_count <= i:
            await asyncio.sleep(0.01)


async def test_a_step_that_fails_for_a_client_that_left_ends_no_other_stream(engine):
    stream = engine.generate(PROMPTS[0], greedy(80))
    await anext(stream)
    go = await held(engine)

    engine._engine.in_flight.pipeline.steps[0].result.wait = Mock(
        side_effect=RuntimeError("the device is gone")
    )
    await stream.aclose()
    other = asyncio.create_task(collect(engine, PROMPTS[1], greedy()))
    await asyncio.sleep(0)
    go.set()
    assert await other == expected(1)


async def test_an_error_reaches_who_has_not_read_all_that_came_before_it(engine):
    abort = engine._engine.abort

    def aborted(request_ids):
        outputs = abort(request_ids)
        time.sleep(0.2)  # the reader sees the request aborted
        return outputs

    async def read_slowly():
        async for _ in engine.generate(PROMPTS[0], greedy(100)):
            await asyncio.sleep(0.02)
            engine._engine.runner.execute = Mock(side_effect=RuntimeError("the device is gone"))
            await asyncio.sleep(0.05)

    engine._engine.abort = aborted
    with pytest.raises(RuntimeError, match="the device is gone"):
        await read_slowly()


async def test_shutdown_ends_open_streams_and_refuses_new_ones(engine):
    waits, go = hold(engine, after=1)
    stream = asyncio.create_task(collect(engine, PROMPTS[0], greedy(100)))
    await asyncio.to_thread(waits.wait, SAFETY)
    stopped = await stopping(engine)
    go.set()
    await stopped
    with pytest.raises(RuntimeError, match="shut down"):
        await asyncio.wait_for(stream, SAFETY)
    for late in (collect(engine, [1], greedy()), engine.metrics(), engine.abort("x")):
        with pytest.raises(RuntimeError, match="shut down"):
            await asyncio.wait_for(late, SAFETY)
    engine.shutdown()  # a second time does nothing


async def test_calls_that_wait_in_line_when_the_engine_shuts_down_are_answered(engine):
    go = await held(engine)
    stopped = await stopping(engine)
    late = asyncio.create_task(collect(engine, PROMPTS[0], greedy()))
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(RuntimeError, match="shut down"):
        await asyncio.wait_for(late, SAFETY)
    await stopped


async def test_two_engines_in_two_threads(engine):
    """They share nothing but MLX and the hook in it."""
    with served("gpt_oss") as other:
        mine = [collect(engine, p, greedy(20)) for p in PROMPTS[:4]]
        theirs = [collect(other, p, greedy(20)) for p in PROMPTS[:4]]
        results = await asyncio.gather(*mine, *theirs)
        assert results[:4] == [expected(i, 20) for i in range(4)]
        assert results[4:] == [expected(i, 20, "gpt_oss") for i in range(4)]


@pytest.mark.long
@pytest.mark.parametrize("shutdown", [True, False])
def test_a_process_that_used_the_engine_ends_well(tmp_path, shutdown):
    folder = tiny.write_folder(tmp_path / "tiny")
    script = f"""
import asyncio
from vllm_metal_lite import AsyncEngine, LLMEngine, SamplingParams
async def main():
    engine = AsyncEngine(LLMEngine.from_name({str(folder)!r}))
    async for output in engine.generate([1, 2, 3], SamplingParams(max_tokens=3)):
        pass
    if {shutdown}:
        engine.shutdown()
asyncio.run(main())
"""
    ended = run_python("-c", script)
    assert (ended.returncode, ended.stderr) == (0, "")


async def test_a_stream_leaves_checkpoints_where_it_is_asked_to():
    shared = tiny.prompts(1, 24, 24, seed=2)[0]
    with served("qwen3_next") as engine:
        await collect(engine, [*shared, 1, 2, 3, 4, 5, 6, 7, 8, 9], greedy(2), checkpoints=[24])
        async for output in engine.generate([*shared, 9], greedy(1)):
            assert output.num_cached_tokens == 24
        with pytest.raises(RequestError, match="checkpoint 9 is outside"):
            await collect(engine, [1, 2], greedy(1), checkpoints=[9])
