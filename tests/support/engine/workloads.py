"""Random workloads of a scheduler: arrivals, requests, and few blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any

from hypothesis import strategies as st

from tests.support.engine.fake_engine import FakeEngine, StepFailed, fake_config
from vllm_metal_lite.scheduler.kv_groups import KVGroup

MAX_MODEL_LEN = 32
Choose = Callable[[Sequence], Any]
# Prompts start with one of these, so that they share prefixes of any length.
STEMS = [[i * 50 + j for j in range(20)] for i in range(2)]
# The KV groups of models: without windows, with some windows, and with windows only.
WINDOWS = [(None,)] * 3 + [(None, 1), (None, 3), (None, 4), (None, 7), (None, 13, 5), (6,), (9, 2)]


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, what it asks, and (abort_at) in which step it is aborted.

    spans: the request has those of them that its engine can compute in one step.
    """

    step: int
    stem: int
    shared: int
    own: int
    max_tokens: int
    priority: int
    skip_read: bool
    max_chunk: int
    spans: tuple[tuple[int, int], ...]
    abort_at: int | None

    @property
    def num_stored(self) -> int:
        return min(self.shared + self.own + self.max_tokens, MAX_MODEL_LEN) - 1


@dataclass(frozen=True)
class Workload:
    """extra_blocks: the blocks of each KV group beyond those that the largest request needs.
    failures: the numbers of the steps that fail."""

    arrivals: tuple[Arrival, ...]
    block_size: int
    extra_blocks: int
    budget: int
    threshold: int
    max_num_seqs: int
    policy: str
    caching: bool
    failures: frozenset[int]
    windows: tuple[int | None, ...]  # of the KV groups


def make_spans(choose: Choose, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """A few spans of a prompt, or none.  Some touch each other; some are the whole prompt."""
    spans, at = [], 0
    for length in choose([(), (), (), (30,), (2, 3), (5,), (4, 4, 4), (1, 9)]):
        start = min(at + choose([0, 0, 1, 2, 5]), num_tokens)
        spans += [(start, at := min(start + length, num_tokens))]
    return tuple(span for span in spans if span[0] < span[1])


def make_workload(choose: Choose, calm: bool = False, pressed: bool = False) -> Workload:
    """calm: no request aborts and no step fails.  pressed: many need more blocks than there are."""

    def arrival() -> Arrival:
        shared, own = choose(range(17)), choose(range(1, 7))
        return Arrival(
            step=choose([0, 0, 0, 1, 2, 4, 8, 12]),
            stem=choose([0, 0, 0, 1]),
            shared=shared,
            own=own,
            max_tokens=choose([1, 2, 3, 5, 8, 11, 14]),
            priority=choose(range(3)),
            skip_read=choose([False, False, False, True]),
            max_chunk=choose([0, 0, 0, 1, 3]),
            spans=make_spans(choose, shared + own),
            abort_at=None if calm else choose([None] * 20 + list(range(20))),
        )

    return Workload(
        arrivals=tuple(arrival() for _ in range(choose(range(4 if pressed else 1, 9)))),
        block_size=choose([1, 2, 3] if pressed else [1, 2, 3, 4, 5]),
        extra_blocks=choose([0, 1, 2, 3] if pressed else [0, 0, 1, 2, 3, 5, 8, 100]),
        budget=choose([1, 2, 3, 5, 8, 8, 13, 21, 40, 64]),
        threshold=choose([0, 0, 1, 4, 9]),
        max_num_seqs=choose(range(3 if pressed else 1, 7)),
        policy=choose(["mixed", "alternate", "whole"]),
        caching=choose([True, True, False]),
        failures=frozenset(() if calm else (choose(range(16)) for _ in range(choose(range(4))))),
        windows=choose(WINDOWS),
    )


@st.composite
def workloads(draw: st.DrawFn, **kind: bool) -> Workload:
    """Workloads that hypothesis can make smaller."""
    return make_workload(lambda options: draw(st.sampled_from(options)), **kind)


def seeded_workload(seed: int, **kind: bool) -> Workload:
    """Workloads that are less alike, and cheaper."""
    return make_workload(Random(seed).choice, **kind)


def make_engine(
    workload: Workload, kind: type[FakeEngine] = FakeEngine, **options: Any
) -> FakeEngine:
    """options: of the engine."""
    config = fake_config(
        workload.block_size,
        max_num_seqs=workload.max_num_seqs,
        max_num_batched_tokens=workload.budget,
        long_prefill_token_threshold=workload.threshold,
        prefill_policy=workload.policy,
        enable_prefix_caching=workload.caching,
    )
    groups = []
    for window in workload.windows:
        group = KVGroup(window=window)
        needs = [group.most_blocks(a.num_stored, 1, workload.block_size) for a in workload.arrivals]
        needs += [
            group.most_blocks(end, end - start, workload.block_size)
            for a in workload.arrivals
            for start, end in a.spans
        ]
        groups.append(replace(group, num_blocks=max(needs) + workload.extra_blocks))
    return kind(config, groups, MAX_MODEL_LEN, **options)


def request_of(
    engine: FakeEngine, number: int, a: Arrival
) -> tuple[list[int], int, dict[str, Any]]:
    """Prompt, max_tokens and options of a request; two by two, some are alike to the end."""
    prompt = STEMS[a.stem][: a.shared] + [200 + number // 2] * a.own
    how = {"request_id": str(number), "arrival": number // 2, "priority": a.priority}
    how |= {"max_chunk": a.max_chunk, "skip_prefix_cache_read": a.skip_read}
    limits = engine.config.max_num_batched_tokens, engine.config.long_prefill_token_threshold
    most = min(limit for limit in (*limits, a.max_chunk) if limit)
    how["spans"] = [(start, end) for start, end in a.spans if end - start <= most]
    return prompt, a.max_tokens, how


def add_to(engine: FakeEngine, number: int, a: Arrival) -> None:
    prompt, max_tokens, how = request_of(engine, number, a)
    engine.add(prompt, max_tokens, **how)


def stepper(workload: Workload, engine: FakeEngine) -> Callable[[], bool]:
    """A function that runs a step, which fails as the workload says; returns whether it failed."""
    numbers = count()

    def step() -> bool:
        try:
            engine.step(fails=next(numbers) in workload.failures)
        except StepFailed:
            return True
        finally:
            engine.check_blocks()
        return False

    return step


def play(
    workload: Workload,
    engine: FakeEngine,
    step: Callable[[], object] | None = None,
    add: Callable[[FakeEngine, int, Arrival], object] = add_to,
) -> set[str]:
    """Requests come, are aborted, and are stepped to the end; the names of the aborted ones.

    step: by default a `stepper`'s.  add: a request, by its number.
    """
    step = step or stepper(workload, engine)
    tokens = sum(a.num_stored for a in workload.arrivals)
    limit = 50 + 2 * tokens * (1 + len(workload.arrivals) + len(workload.failures))
    aborted: set[str] = set()
    now, last = 0, max(a.step for a in workload.arrivals)
    while now <= last or engine.unfinished:
        for number, a in enumerate(workload.arrivals):
            if a.step == now:
                add(engine, number, a)
            if a.abort_at == now and str(number) in engine.unfinished:
                aborted.add(str(number))
                engine.abort(str(number))
        if engine.unfinished:
            step()
        now += 1
        assert now < limit, "a request does not finish"
    return aborted
