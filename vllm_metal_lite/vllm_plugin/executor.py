"""vLLM's executor for several hosts: no wait for another host's answer outlasts the engine.

When a rank is lost, vLLM 0.33 cancels its waits for answers of its own host only.  The answer of
stages comes from the last host, so requests would wait for `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

_POLL = 0.5  # seconds between checks of is_failed


class HostsExecutor(MultiprocExecutor):
    """The `MultiprocExecutor` that runs on the first host."""

    def _init_executor(self) -> None:
        super()._init_executor()
        for queue in self.response_mqs[self.local_world_size :]:
            queue.dequeue = partial(dequeue_while_alive, self, queue.dequeue)


def dequeue_while_alive(
    executor: MultiprocExecutor, dequeue: Callable[[float], Any], timeout: float | None = None
) -> Any:
    """The next answer of a rank on another host; `dequeue` takes seconds.

    timeout: seconds; None waits as long as the executor lives.  Raises TimeoutError; RuntimeError
    if the executor has failed, as vLLM's queues of one host do.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _POLL if end is None else max(end - time.monotonic(), 0.0)
        try:
            return dequeue(min(left, _POLL))
        except TimeoutError:
            if executor.is_failed:
                raise RuntimeError("cancelled: a rank of this engine was lost") from None
            # The queue rounds waits down to milliseconds, so a wait may end early.
            if end is not None and time.monotonic() >= end:
                raise
