"""Requests that spoil their steps."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.scheduler.scheduler_output import Segment

PLACES = ("launch", "inside", "after", "wait")


class Fault(RuntimeError):
    """Raised by a step that is spoiled."""


def decodes_from(nth: int) -> Callable[[Segment], bool]:
    """Whether a segment is a request's nth decode or a later one; 0: its prompt's last chunk.  The
    prompt that a request computes again after a failure is no decode."""

    def spoils(segment: Segment) -> bool:
        position = segment.num_computed - segment.request.num_prompt_tokens
        if nth == 0:
            return position < 0 and segment.end >= segment.request.num_prompt_tokens
        return not segment.is_prompt and position + 1 >= nth

    return spoils


def spoil(engine: LLMEngine, bad: Mapping[str, tuple[Callable[[Segment], bool], str]]) -> None:
    """Make steps fail.  bad: by the user's id of a request, which of its segments spoil a step, and
    at which of PLACES the step then fails."""
    runner = engine.runner
    execute, sample = runner.execute, runner._sample_and_score
    at: set[str] = set()

    def fail(*_: Any) -> None:
        raise Fault("the forward failed")

    def spoiled(batch: Any, *args: Any) -> Any:
        at.clear()
        for s in engine.in_flight.outputs[-1].segments:
            spoils, place = bad.get(s.request.parent_id, (None, ""))
            if spoils is not None and spoils(s):
                at.add(place)
        if "launch" in at:
            fail()
        result = execute(batch, *args)
        if "after" in at:
            fail()
        if "wait" in at:
            result.wait = fail
        return result

    def sampled(*args: Any) -> Any:
        return fail() if "inside" in at else sample(*args)

    runner.execute, runner._sample_and_score = spoiled, sampled


def serve(engine: LLMEngine, max_steps: int = 4000) -> tuple[dict[str, Any], dict[str, str]]:
    """Step to the end, as a server does.  Returns outputs and errors by request id."""
    done: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return done, errors
        try:
            done |= {o.request_id: o for o in engine.step() if o.finished}
        except Exception as e:
            for request_id in engine.requests_at_fault:
                assert request_id not in errors
                errors[request_id] = str(e)
                engine.abort(request_id)
    raise AssertionError(f"requests are left after {max_steps} steps")
