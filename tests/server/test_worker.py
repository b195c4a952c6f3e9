"""An engine's process and its client: whatever a request does, nothing is held and nobody waits."""

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from unittest.mock import Mock

import pytest

from tests.support.server.kit import start_engine
from tests.support.server.scripted import hermes_call
from vllm_metal_lite import EngineConfig, SamplingParams
from vllm_metal_lite.chat_formats.events import Text
from vllm_metal_lite.chat_formats.json_markers import HERMES
from vllm_metal_lite.chat_formats.parser import ChatParser
from vllm_metal_lite.chat_formats.tool import Tool
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.engine.failed_steps import MAX_FAILURES
from vllm_metal_lite.errors import BusyError, RequestError, SamplingError
from vllm_metal_lite.server.deltas import deltas, whole_answers
from vllm_metal_lite.server.worker import process
from vllm_metal_lite.server.worker.client import EngineClient
from vllm_metal_lite.server.worker.messages import Add, Delta, EngineLost
from vllm_metal_lite.server.worker.process import Caller, Worker
from vllm_metal_lite.server.worker.request_state import RequestState, news_of
from vllm_metal_lite.structured_outputs import compiler

CONFIG = EngineConfig(num_blocks=256, max_num_seqs=4, max_num_batched_tokens=64)
PROMPT = list(range(40, 60))
FOREVER = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)


def short(max_tokens: int = 8, **given) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **given)


@pytest.fixture(scope="module")
def async_runner() -> Iterator[asyncio.Runner]:
    """The event loop that the client lives in."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(async_runner) -> Iterator[EngineClient]:
    client = async_runner.run(start_engine("demo", CONFIG))
    yield client
    async_runner.run(client.stop())


async def answer(
    client: EngineClient, name: str, params: SamplingParams, prompt: list[int] = PROMPT
) -> Delta:
    async with client.generate(Add(name, prompt, params)) as request:
        (whole,) = await whole_answers(deltas([request]))
        return whole


async def until(client: EngineClient, is_so: Callable[[dict[str, int]], bool]) -> None:
    """Wait until the engine's metrics are so."""
    reached = asyncio.Event()

    def take(text: str) -> None:
        if is_so(json.loads(text)["metrics"]):
            reached.set()

    client.watch(60, take)
    await reached.wait()
    client.watch(0, take)


async def assert_clean(client: EngineClient) -> None:
    """Neither the client nor the engine holds anything."""
    names = ("requests_running", "requests_waiting", "blocks_owned")
    await until(client, lambda metrics: not any(metrics[name] for name in names))
    assert not client.requests
    assert not client._replies


async def test_an_answer_over_the_pipe_is_the_engines(client):
    own = LLMEngine.from_name("demo", CONFIG)
    own.add_request("a", {"prompt_token_ids": PROMPT}, short(20))
    outputs = []
    while own.has_unfinished_requests():
        outputs = own.step() or outputs
    (expected,), got = outputs[0].outputs, await answer(client, "a", short(20))
    assert (got.token_ids, got.text) == (expected.token_ids, expected.text)


MOMENTS = ("before it is accepted", "accepted", "waiting", "prefilling", "decoding", "the end")


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_client_that_leaves_at_any_moment_leaves_nothing(client, moment, n):
    params = SamplingParams(n=n, max_tokens=60, seed=1, ignore_eos=True)
    long = [i % 200 for i in range(800)]  # 13 steps

    async def request(reached: asyncio.Event) -> None:
        prompt = long if moment == "prefilling" else PROMPT
        async with client.generate(Add("leaves", prompt, params)) as request:
            if moment in ("accepted", "waiting"):
                reached.set()
            elif moment == "prefilling":
                await until(client, lambda metrics: metrics["prefill_tokens"] >= before + 64)
                reached.set()
            async for _ in deltas([request]):
                if moment == "decoding":
                    reached.set()
            reached.set()
            await asyncio.Event().wait()

    before = client.metrics.get("prefill_tokens", 0)
    others = []
    if moment == "waiting":
        others = [asyncio.ensure_future(answer(client, str(i), FOREVER)) for i in range(4)]
        await until(client, lambda metrics: metrics["requests_running"] == 4)
    reached = asyncio.Event()
    leaves = asyncio.ensure_future(request(reached))
    if moment == "before it is accepted":
        await asyncio.sleep(0)
    else:
        await reached.wait()
    if moment == "waiting":
        await until(client, lambda metrics: metrics["requests_waiting"] == n)
    for task in leaves, *others:
        task.cancel()
    await asyncio.gather(leaves, *others, return_exceptions=True)
    await assert_clean(client)


@pytest.mark.parametrize("stop", [None, ["zzz"]])
async def test_a_slow_reader_gets_the_same_at_once(client, stop):
    params = SamplingParams(n=3, max_tokens=25, seed=7, logprobs=2, stop=stop)
    async with client.generate(Add("fast", PROMPT, params, cache_salt="a")) as request:
        fast = await whole_answers(deltas([request]))
        times = request.times
        assert times.arrived <= times.scheduled <= times.first_token <= times.finished
        assert [len(delta.token_ids) for delta in fast] == request.num_tokens_of
    async with client.generate(Add("slow", PROMPT, params, cache_salt="b")) as request:
        await request.complete()
        slow = [delta async for delta in deltas([request])]
    assert [delta._replace(events=()) for delta in slow] == [d._replace(events=()) for d in fast]
    for delta in slow:
        assert delta.events == [Text(delta.text)]
        assert [scores[0][0] for scores in delta.logprobs] == delta.token_ids
        assert delta.finish_reason in ("stop", "length")
    await assert_clean(client)


async def test_a_refused_request_is_forgotten(client):
    client.call("add", Add("twice", PROMPT, FOREVER))
    with pytest.raises(RequestError, match="already in use"):
        await answer(client, "twice", FOREVER)
    client.call("abort", "twice")
    with pytest.raises(RequestError, match="prompt of 5000 tokens"):
        await answer(client, "long", short(), [1] * 5000)
    await assert_clean(client)


async def test_a_request_that_breaks_the_engine_harms_no_other(client):
    other = asyncio.ensure_future(answer(client, "other", short(30)))
    with pytest.raises(EngineLost, match="the engine failed"):
        await answer(client, "broken", short(), Unreadable([1]))
    assert len((await other).token_ids) == 30
    await assert_clean(client)


class Unreadable(list):
    """A prompt that the engine's process cannot look at."""

    def __iter__(self):
        if multiprocessing.parent_process() is not None:
            raise TypeError("a bug")
        return super().__iter__()


async def test_ctrl_c_does_not_reach_the_engine(client):
    os.kill(client.pid, signal.SIGINT)
    assert await answer(client, "after", short())


def test_the_engines_log_reaches_the_servers_log(client, caplog):
    """With levels, and with the lines that show progress."""
    server, theirs = Pipe()
    log = logging.Logger("in the process")
    log.addHandler(Caller(theirs))
    log.info("trying %d kernels", 3, extra={"transient": True})
    log.warning("a kernel was replaced")
    with caplog.at_level(logging.INFO, "vllm_metal_lite"):
        for _ in range(2):
            client._take(server.recv())
    got = [(r.levelname, r.getMessage(), r.transient) for r in caplog.records]
    assert got == [("INFO", "trying 3 kernels", True), ("WARNING", "a kernel was replaced", False)]


def test_a_step_that_fails_loses_the_request_at_fault_only():
    """The worker alone, in this process.  Both prompts are in the step that fails first."""
    engine = LLMEngine.from_name("demo", CONFIG)
    execute = engine.runner.execute

    def fail_for_token_7(batch, *args):
        if 7 in batch.token_ids:
            raise RuntimeError("the device\nis gone")
        return execute(batch, *args)

    engine.runner.execute = fail_for_token_7
    server, theirs = Pipe()
    send, got = Caller(server).call, []
    send("add", Add("a", [*PROMPT, 7], short(8, allowed_token_ids=[8])))
    send("add", Add("b", PROMPT, short(8, allowed_token_ids=[8])))

    def read() -> None:
        finished = False
        while not finished:
            method, args = server.recv()
            got.append((method, args))
            finished = method == "stepped" and args[0]["b"][0].finish_reason is not None
        send("stop")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    Worker(engine, theirs, Caller(theirs)).run()
    thread.join(60)
    assert got[0][0] == "measured"
    assert got[1:3] == [("replied", ("a",)), ("replied", ("b",))]
    [(ids, error)] = [args for method, args in got if method == "failed"]
    assert ids == ["a"]
    assert repr(error) == "EngineLost('a step of the engine failed: the device is gone')"
    steps = [args[0] for method, args in got if method == "stepped"]
    assert all(list(step) == ["b"] for step in steps)
    assert sum(len(update.token_ids) for step in steps for update in step["b"]) == 8
    assert engine.metrics()["blocks_owned"] == 0


def test_an_idle_engine_that_stops_first_does_the_work_that_waits_for_a_pause():
    """This work is, for example, copies to the prefix disk for the model's next load."""
    engine = LLMEngine.from_name("demo", CONFIG)
    engine.rest = Mock(side_effect=[True, True, False])
    server, theirs = Pipe()
    Caller(server).call("stop")
    Worker(engine, theirs, Caller(theirs)).run()
    assert engine.rest.call_count == 3


@pytest.mark.parametrize("kind", [SamplingError, BusyError])
def test_a_grammar_that_cannot_be_made_ends_its_request(monkeypatch, kind):
    """So `add`, which would wait for the grammar between two steps, never comes."""
    monkeypatch.setattr(process, "constraint_of", Mock(side_effect=kind("no grammar")))
    server, theirs = Pipe()
    Worker(Mock(), theirs, Caller(theirs)).compile("a", short(), "client")
    method, (ids, error) = server.recv()
    assert (method, ids, str(error)) == ("failed", ["a"], "no grammar")
    assert isinstance(error, BusyError if kind is BusyError else RequestError)


def test_adding_a_request_compiles_nothing(monkeypatch):
    """However many grammars are made between; those of requests that left are not held."""
    made = Mock(side_effect=compiler.LLMatcher)
    monkeypatch.setattr(compiler, "LLMatcher", made)
    server, theirs = Pipe()
    worker = Worker(LLMEngine.from_name("demo", CONFIG), theirs, Caller(theirs))
    forms = [short(structured_outputs={"regex": f"{i}+"}) for i in range(12)]
    for i, form in enumerate(forms):
        worker.compile(str(i), form, "client")
        assert server.recv() == ("replied", (str(i),))
    worker.abort("11")
    for i, form in enumerate(forms[:11]):
        worker.add(Add(str(i), PROMPT, form))
    assert made.call_count == 12
    assert not worker._grammars


def test_an_engine_whose_steps_all_fail_ends():
    """So the next request starts another one."""
    engine = LLMEngine.from_name("demo", CONFIG)
    engine.runner.execute = Mock(side_effect=RuntimeError("the device is gone"))
    server, theirs = Pipe()

    def serve() -> None:
        with suppress(OSError, EOFError):  # each request fails twice, so the last ones are too many
            for name in range(MAX_FAILURES):
                Caller(server).call("add", Add(str(name), PROMPT, short()))
                while server.recv()[0] != "failed":
                    pass

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(SystemExit):
        Worker(engine, theirs, Caller(theirs)).run()


async def test_lost_requests_fail_and_others_go_on(client):
    async with (
        client.generate(Add("lost", PROMPT, FOREVER)) as lost,
        client.generate(Add("other", PROMPT, short())) as other,
    ):
        client.failed(["lost"], EngineLost("a step failed"))
        with pytest.raises(EngineLost, match="a step failed"):
            await lost.complete()
        with pytest.raises(EngineLost, match="a step failed"):
            [delta async for delta in deltas([lost])]
        await other.complete()
        assert other.num_tokens == 8
        client.call("abort", "lost")
    await assert_clean(client)


async def test_many_unread_deltas_become_few():
    request = RequestState(Add("a", PROMPT, short(stop=["z"], logprobs=0)), None)
    tokens = list(range(2000))
    for token in tokens:
        request.take([Delta(0, [token], f"{token} ", logprobs=[[(token, -0.5, 1)]])])
    assert len(request.unread[0]) < 300
    _, delta = await anext(news_of([request]))
    assert (delta.token_ids, list(map(int, delta.text.split()))) == (tokens, tokens)
    assert [scores[0][0] for scores in delta.logprobs] == tokens


async def test_an_answer_that_is_over_for_its_reader_still_runs_in_the_engine():
    """So the engine hears of its end when the client leaves, though further tokens came."""
    request = RequestState(Add("a", PROMPT, short(stop=["zzz"])), None)
    request.take([Delta(0, [5], hermes_call("run"))])
    one_call = deltas([request], lambda: ChatParser(HERMES, [Tool("run")]), parallel=False)
    assert [delta.finish_reason async for delta in one_call] == ["tool_calls"]
    request.take([Delta(0, [6], "more")])
    assert (request.finish_reasons, request.finished) == (["stop"], False)
    request.take([Delta(0, [7], "", "length")])
    assert request.finished


async def test_a_generation_that_fails_while_another_is_read_is_not_taken_for_finished(client):
    tokenizer = client.model.tokenizer
    first, second = (RequestState(Add(name, PROMPT, short()), tokenizer) for name in "ab")
    first.take([Delta(0, [5])])
    second.take([Delta(0, [6], finish_reason="length")])
    news = news_of([first, second])
    assert [(await anext(news))[1].token_ids for _ in range(2)] == [[5], [6]]
    first.fail(EngineLost("gone"))
    with pytest.raises(EngineLost, match="gone"):
        await anext(news)
