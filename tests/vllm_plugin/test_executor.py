"""Waits for another host's answer end with the engine."""

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from vllm_metal_lite.vllm_plugin.executor import dequeue_while_alive


@pytest.fixture
def sides():
    """Where a rank of another host answers, how the executor waits, and the executor."""
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    waits = threading.Thread(target=writer.wait_until_ready)
    waits.start()
    reader.wait_until_ready()
    waits.join()
    executor = SimpleNamespace(is_failed=False)
    yield writer, partial(dequeue_while_alive, executor, reader.dequeue), executor
    for socket in writer.remote_socket, reader.remote_socket:
        socket.close(linger=0)


def test_an_answer_arrives(sides):
    writer, wait, _ = sides
    writer.enqueue(("done", 7))
    assert wait(timeout=60) == ("done", 7)
    threading.Timer(0.8, writer.enqueue, [("late", 8)]).start()
    assert wait() == ("late", 8)


def test_no_answer_in_time(sides):
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        sides[1](timeout=0.7)
    assert time.monotonic() >= start + 0.7
    with pytest.raises(TimeoutError):
        sides[1](timeout=0.0)


def test_a_lost_rank_ends_the_wait(sides):
    _, wait, executor = sides
    threading.Timer(0.2, setattr, [executor, "is_failed", True]).start()
    with pytest.raises(RuntimeError, match="a rank of this engine was lost"):
        wait(timeout=300)
