"""The loop of an engine that serves others: their calls, steps, and work that waits for a pause."""

import logging
from collections.abc import Callable

from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import one_line
from vllm_metal_lite.outputs import RequestOutput

logger = logging.getLogger(__name__)


def run_steps(
    engine: LLMEngine,
    *,
    has_call: Callable[[], bool],
    take_call: Callable[[], bool],
    deliver: Callable[[list[RequestOutput]], None],
    fail: Callable[[list[str], Exception], None],
) -> None:
    """Run steps, and the calls that come between them, until a call ends the loop.

    has_call: whether a call has come.  take_call: runs the next call, and waits if there is none;
    returns whether the loop continues.
    deliver: gets the requests that got tokens, after each step.
    fail: gets the ids of requests and the error of the step that ends them.  They are aborted after
    it has returned.
    """
    may_rest = True
    while True:
        while has_call() or not (engine.has_unfinished_requests() or may_rest):
            if not take_call():
                return
            may_rest = True
        if not engine.has_unfinished_requests():
            try:
                may_rest = engine.rest()
            except Exception as e:
                may_rest = False
                logger.warning(f"work in a pause failed: {one_line(e)}")
            continue
        outputs: list[RequestOutput] = []
        try:
            outputs = engine.step()
        except Exception as e:
            lost = engine.requests_at_fault
            fail(lost, e)
            engine.abort(lost)
        deliver(outputs)
