"""256 clients at random: the answers are right, and nothing is left behind."""

import asyncio
import os
import random
import sys
import threading
import time

import pytest

from tests.support.server.crowd import Crowd, Question, get, questions, send, unclean, until
from tests.support.server.kit import serving
from vllm_metal_lite import LLM, EngineConfig, SamplingParams
from vllm_metal_lite.server.settings import ServerConfig

# The pool holds three or four of the requests that its seats would run.
TINY = EngineConfig(num_blocks=36, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512)
CLIENTS, WARM_UP = 256, 48
# 15 of the pool's 36 blocks: those that sit at once must preempt each other.
LONG = Question("What is under the mat?", 200)


def held(running, pid):
    """What the processes of server and engine hold; the clients hold none of it between visits."""

    async def tasks():
        return len(asyncio.all_tasks())

    fds = {"server's fds": len(os.listdir("/dev/fd"))}
    if sys.platform == "linux":
        fds["engine's fds"] = len(os.listdir(f"/proc/{pid}/fd"))
        fds["engine's threads"] = len(os.listdir(f"/proc/{pid}/task"))
    # Of threads for parsing and the like there are a few, which start when they are first needed.
    threads = [one for one in threading.enumerate() if one.name != "offloaded work"]
    return {
        **fds,
        "threads": len(threads),
        "tasks": asyncio.run_coroutine_threadsafe(tasks(), running.loop).result(30),
    }


def greedy_answers(asked):
    llm = LLM("demo")
    params = [
        SamplingParams(temperature=0, max_tokens=one.max_tokens, ignore_eos=True) for one in asked
    ]
    outputs = llm.chat([one.messages for one in asked], params)
    return [o.outputs[0].text for o in outputs], [o.prompt_token_ids for o in outputs]


@pytest.mark.long
def test_a_crowd_leaves_nothing_behind():
    asked = [*questions(24), LONG]
    answers, token_ids = greedy_answers(asked)
    rng = random.Random(19)

    with serving(engine=TINY, config=ServerConfig(port=0, max_waiting=CLIENTS)) as running:
        crowd = Crowd(running.url, asked, answers, token_ids)

        async def come(count, patience):
            visits = [crowd.asking(rng, asked.index(LONG)) for _ in range(TINY.max_num_seqs)]
            visits += [crowd.draw(rng, patience) for _ in range(count)]
            await asyncio.gather(*(crowd.go(visit, 600) for visit in visits))
            return await until(lambda: unclean(running.url), 60)

        assert not asyncio.run(come(WARM_UP, 1))
        status = asyncio.run(get(running.url, "/status"))
        before = held(running, status["models"][0]["pid"])

        left = asyncio.run(come(CLIENTS, 8))
        status = asyncio.run(get(running.url, "/status"))
        print(crowd.counts, status["models"][0]["metrics"])
        assert crowd.faults == []
        assert left == ""
        assert status["models"][0]["metrics"]["preemptions"] > 0
        assert min(crowd.counts[kind] for kind in ("left", "answered", "refused")) > 20
        assert not running.server.requests

        def more():
            after = held(running, status["models"][0]["pid"])
            return {name: n - before[name] for name, n in after.items() if n > before[name]}

        # The server closes the last socket a moment after its answer.
        deadline = time.monotonic() + 60
        while more() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert more() == {}
        health = asyncio.run(send(running.url, "GET", "/health"))
        assert health is not None
        assert health.status == 200
