"""The events of an engine, for its watchers: its steps, its requests and a map of its blocks.

Without watchers nothing is recorded.  An event costs the engine time.  So the watcher measures that
time and then waits `_PATIENCE` times as long: watching takes less than 1 % of the engine's time.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

_SECONDS = 0.25  # least time between events
_PATIENCE = 200  # least time between events, as a multiple of an event's cost
_MAX_STEPS = 100  # an event shows at most this many of the latest steps
_MAX_WAITING = 100  # an event shows at most this many waiting requests
_MAX_CELLS, _ROUND = 1024, 256  # most cells of the map; it shows a multiple of _ROUND blocks

# Codes of cells; a code > 0 is the number of the request that alone owns the block.
FREE, CACHED, SHARED = 0, -1, -2


class Watcher:
    """Makes events of an engine while it is watched.  The engine calls `on_step`."""

    def __init__(self, engine: LLMEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._started = self._step_end = clock()
        self._until = self._next_at = self._started
        self._has_news = False
        self._steps: deque[tuple[SchedulerOutput, float, float]] = deque(maxlen=_MAX_STEPS)
        self._num_preemptions: dict[int, int] = {}  # by number of the request

    def watch(self, seconds: float) -> None:
        """Make events for the next `seconds`.  The next one is due at once."""
        now = self._clock()
        if now > self._until:  # nobody watched until now
            self._steps.clear()
            self._num_preemptions = _preemptions(self._requests())
        self._until = now + seconds
        self._has_news = True

    def changed(self) -> None:
        """Note a change that is not a step, such as a request that was queued or has left."""
        self._has_news = self._clock() < self._until

    def on_step(self, output: SchedulerOutput) -> None:
        """Note that a step is complete."""
        now = self._clock()
        if now < self._until:
            # One step is submitted ahead, so the device starts a step when the one before ends.
            self._steps.append((output, max(output.launched_at, self._step_end), now))
            self._has_news = True
        self._step_end = now

    def wait(self) -> float | None:
        """Seconds until the next event is due; None if there is nothing to tell."""
        now = self._clock()
        if not self._has_news or now >= self._until:
            return None
        return max(self._next_at - now, 0.0)

    def event(self) -> str:
        """The next event, as JSON.

        time: seconds since the watcher was made, like all times of an event.
        steps: the steps completed since the last event, at most the last `_MAX_STEPS`.  Each has
            its start `t`, its duration `ms`, and `segments` of (request number, tokens, context
            before them).  Decodes come first; `decodes` is their number.
        num_steps: how many steps the engine has run so far.
        requests: the running requests, and the first `_MAX_WAITING` that wait.
        preempted: the numbers of the requests that were preempted since the last event.
        blocks: see `block_map`.  metrics: LLMEngine.metrics().
        """
        start = self._clock()
        text = json.dumps(self._snapshot(start), separators=(",", ":"))
        self._has_news = False
        end = self._clock()
        self._next_at = end + max(_SECONDS, _PATIENCE * (end - start))
        return text

    def _requests(self) -> list[Request]:
        scheduler = self._engine.scheduler
        return [*scheduler.running, *scheduler.waiting]

    def _snapshot(self, now: float) -> dict[str, Any]:
        engine = self._engine
        running, waiting = engine.scheduler.running, engine.scheduler.waiting
        counts = _preemptions([*running, *waiting])
        known, self._num_preemptions = self._num_preemptions, counts
        steps = [self._step(*step) for step in self._steps]
        self._steps.clear()
        metrics = engine.metrics()
        return {
            "time": round(now - self._started, 3),
            "steps": steps,
            "num_steps": metrics["steps"],
            "requests": [
                *(_request(request, "running") for request in running),
                *(_request(request, "waiting") for request in waiting[:_MAX_WAITING]),
            ],
            "preempted": [n for n, count in counts.items() if count > known.get(n, 0)],
            "blocks": block_map(engine, running),
            "metrics": metrics,
        }

    def _step(self, output: SchedulerOutput, start: float, end: float) -> dict[str, Any]:
        # The scheduler puts decodes with drafts among the chunks; here they come first.
        segments = sorted(output.segments, key=lambda segment: segment.is_prompt)
        return {
            "t": round(start - self._started, 4),
            "ms": round(1e3 * (end - start), 2),
            "decodes": sum(not s.is_prompt for s in segments),
            "segments": [[number(s.request), s.num_scheduled, s.num_computed] for s in segments],
        }


def number(request: Request) -> int:
    """A request's number: 1, 2, ... in order of arrival."""
    return request.sort_key[-1] + 1


def _preemptions(requests: Iterable[Request]) -> dict[int, int]:
    return {number(r): r.num_preemptions for r in requests if r.num_preemptions}


def _request(request: Request, state: str) -> dict[str, Any]:
    generated = request.num_tokens - request.num_prompt_tokens
    return {
        "n": number(request),
        "id": request.request_id,
        "state": state,
        "prompt": request.num_prompt_tokens,
        "computed": request.num_computed_tokens,
        "generated": generated - (request.token_ids[-1] == UNKNOWN_TOKEN),
        "cached": request.num_cached_tokens,
        "preempted": request.num_preemptions,
    }


def block_map(engine: LLMEngine, running: Iterable[Request]) -> dict[str, Any]:
    """The blocks of the first KV group, in order of their ids, as runs of [code, cells].

    mapped: how many blocks the runs show, up to the last one in use; later blocks are free.
    per_cell: how many blocks a cell shows, by the highest of their codes.
    counts: how many blocks of each kind there are.
    """
    pool = engine.scheduler.kv.pools[0]
    # Owners by number, so that a cell of several blocks can show the highest: free, cached, shared,
    # then requests.
    owners = np.zeros(pool.num_blocks, np.int32)
    owners[pool.cached_blocks()] = 1
    for request in running:
        if request.block_tables:
            blocks = request.block_tables[0].owned
            owners[blocks] = np.where(owners[blocks] > 1, 2, number(request) + 2)
    free, cached, shared, owned = np.bincount(np.minimum(owners, 3), minlength=4).tolist()
    end = int(np.flatnonzero(owners)[-1]) + 1 if free < pool.num_blocks else 1
    mapped = min(-(-end // _ROUND) * _ROUND, pool.num_blocks)
    per_cell = -(-mapped // _MAX_CELLS)
    owners = np.maximum.reduceat(owners[:mapped], np.arange(0, mapped, per_cell))
    codes = np.where(owners > 2, owners - 2, -owners)
    starts = np.flatnonzero(np.diff(codes, prepend=SHARED - 1))
    lengths = np.diff(starts, append=len(codes))
    return {
        "total": pool.num_blocks,
        "size": engine.config.block_size,
        "mapped": mapped,
        "per_cell": per_cell,
        "counts": {"owned": owned, "shared": shared, "cached": cached, "free": free},
        "runs": np.stack([codes[starts], lengths], axis=1).tolist(),
    }
