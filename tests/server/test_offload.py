"""Work off the event loop: bounded, in turns, ended when its caller leaves."""

import asyncio
import threading

import pytest

from tests.support.run_python import run_python
from vllm_metal_lite.server.offload import (
    LARGE,
    REQUESTER,
    Abandoned,
    Requester,
    Threads,
    check_wanted,
    offload,
)


async def test_results_and_errors_come_back():
    assert await offload(divmod, 7, 3) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        await offload(divmod, 7, 0)


async def test_clients_take_turns():
    """One thread is busy; a client's pile waits, then another client comes with one piece."""
    threads, held, done = Threads(1), threading.Event(), []

    async def submit(client: str, name: str) -> None:
        REQUESTER.set(Requester(client))
        await offload(done.append, name, threads=threads)

    first = asyncio.ensure_future(offload(held.wait, threads=threads))
    pile = [asyncio.ensure_future(submit("pile", f"pile {i}")) for i in range(5)]
    await asyncio.sleep(0)
    other = asyncio.ensure_future(submit("other", "other"))
    await asyncio.sleep(0)
    held.set()
    await asyncio.gather(first, *pile, other)
    assert done.index("other") == 1
    assert done[0] == "pile 0"
    assert len(done) == 6


async def test_small_work_does_not_wait_for_large_work():
    held = threading.Event()

    async def large() -> None:
        REQUESTER.set(Requester(size=LARGE))
        await offload(held.wait)

    waits = [asyncio.ensure_future(large()) for _ in range(10)]
    await asyncio.sleep(0)
    assert await offload(int, "3") == 3
    held.set()
    await asyncio.gather(*waits)


async def test_work_ends_when_its_caller_leaves():
    threads, began, ended = Threads(1), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        try:
            while True:
                check_wanted()
        except Abandoned:
            ended.set()
            raise

    running = asyncio.ensure_future(offload(work, threads=threads))
    waiting = asyncio.ensure_future(offload(pytest.fail, "not begun", threads=threads))
    while not began.is_set():
        await asyncio.sleep(0)
    waiting.cancel()
    running.cancel()
    assert await offload(int, "3", threads=threads) == 3
    assert ended.is_set()


NEVER_ENDS = """
import asyncio, threading
from vllm_metal_lite.server.offload import offload

async def main():
    await asyncio.wait([asyncio.ensure_future(offload(threading.Event().wait))], timeout=0.1)

asyncio.run(main())
"""


def test_work_that_never_ends_does_not_keep_a_process():
    done = run_python("-c", NEVER_ENDS)
    assert (done.returncode, done.stderr) == (0, "")
