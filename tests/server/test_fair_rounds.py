"""A pile of one client's requests does not keep another client waiting."""

import asyncio
import random
from contextlib import ExitStack

import httpx

from tests.support.server.kit import start_engine
from tests.support.server.raw_http import CHAT
from vllm_metal_lite import EngineConfig, SamplingParams
from vllm_metal_lite.server.offload import REQUESTER, Requester
from vllm_metal_lite.server.worker.fair_rounds import FairRounds
from vllm_metal_lite.server.worker.messages import Add


def test_a_newcomer_passes_a_pile():
    fair = FairRounds()
    assert [fair.next_round("pile") for _ in range(10)] == list(range(10))
    assert fair.next_round("other") == 0
    for ended in 0, 0, 1, 2, 3:
        fair.end(ended)
    assert fair.next_round("other") == 4
    assert fair.next_round("pile") == 10


def test_one_client_alone_is_served_in_order_and_nothing_is_kept():
    fair = FairRounds()
    for _ in range(3):
        assert fair.next_round("a") == 0
        fair.end(0)
    fair.next_round("b")
    assert list(fair._last) == ["b"]


def test_no_request_waits_forever():
    """One seat: two busy clients come again and again, and the last of a pile is served."""
    fair, rng = FairRounds(), random.Random(1)
    waiting = []  # (round, arrival, client)

    def add(client: str, arrival: int) -> None:
        waiting.append((fair.next_round(client), arrival, client))

    for i in range(20):
        add("pile", i)
    for i in range(20, 500):
        served = min(waiting)
        waiting.remove(served)
        fair.end(served[0])
        add(rng.choice(["x", "y"]), i)
        if not any(client == "pile" for *_, client in waiting):
            break
    assert i < 150


async def test_the_engine_serves_clients_in_rounds():
    """One seat: the pile's first request runs, then the other client's."""
    engine = await start_engine("demo", EngineConfig(num_blocks=64, max_num_seqs=1))
    ended: list[str] = []

    async def ask(client: str, name: str) -> None:
        REQUESTER.set(Requester(client))
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        async with engine.generate(Add(name, [5, 6, 7], params)) as request:
            await request.complete()
        ended.append(name)

    tasks = [asyncio.ensure_future(ask("pile", f"pile {i}")) for i in range(6)]
    tasks.append(asyncio.ensure_future(ask("other", "other")))
    await asyncio.gather(*tasks)
    await engine.stop()
    assert ended.index("other") == 1


def test_paths_and_users_are_clients_of_their_own(running):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    asked = [(CHAT, chat), (CHAT, chat), (CHAT, {**chat, "user": "index"})]
    with ExitStack() as streams:
        for path, body in [*asked, ("/v1/completions", {"prompt": "hi"})]:
            body |= {"stream": True, "max_tokens": 4000, "ignore_eos": True}
            stream = httpx.stream("POST", running.url + path, json=body, timeout=60)
            assert streams.enter_context(stream).status_code == 200
        rounds = [request.fair_round for request in running.server.requests.values()]
    assert rounds == [0, 1, 0, 0]
