"""State slots under random workloads, in an engine over a FakeModel.

Its states are the tokens that they cover.  Each segment must find its own prefix, and no other, in
its initial slot; each checkpoint must cover the tokens of its name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine import workloads as workloads_of
from tests.support.engine.fake_engine import FakeEngine, answer_of, expected
from tests.support.engine.workloads import (
    MAX_MODEL_LEN,
    Arrival,
    Workload,
    make_engine,
    request_of,
    seeded_workload,
    workloads,
)
from vllm_metal_lite.scheduler import checkpoints, following
from vllm_metal_lite.scheduler.prefix_hash import extend_block_names


@dataclass(frozen=True)
class Slots:
    """extra: slots beyond one per seat.  ahead: steps are scheduled before the last tokens are
    known.  named: positions that every caller names."""

    extra: int
    ahead: bool
    named: tuple[int, ...]


slots_of = st.builds(
    Slots,
    extra=st.sampled_from([0, 0, 1, 2, 3, 6, 40]),
    ahead=st.booleans(),
    named=st.lists(st.integers(1, MAX_MODEL_LEN), max_size=3).map(tuple),
)


@pytest.fixture(scope="module", autouse=True)
def short_intervals() -> Iterator[None]:
    """Prompts of this file are short: disposable checkpoints and waiting must happen in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "NEAREST", 3)
        patch.setattr(following, "WORTH_WAITING", 2)
        yield


def look(engine: FakeEngine, seen: set[str]) -> None:
    """At a step that is launched."""
    out = engine.in_flight.outputs[-1]
    for s in out.segments:
        before = engine.runner.model.states[s.state.final][: s.num_computed]
        assert [*before] == s.request.token_ids[: s.num_computed], "another prefix's state"
        if s.request in out.admitted and s.num_computed:
            seen.add("hit")
            if s.state.initial == s.state.final:
                seen.add("took a checkpoint over")
        if s.state.checkpoints:
            seen.add("checkpoint inside")
    if out.preempted:
        seen.add("preempted")


def check_names(engine: FakeEngine) -> None:
    """Every checkpoint covers exactly the tokens of its name."""
    size, pool = engine.config.block_size, engine.scheduler.kv.states
    for name, slot in pool._by_name.items():
        names: list[bytes] = []
        tokens = engine.runner.model.states[slot]
        extend_block_names(names, tokens, size, len(tokens) // size)
        assert len(tokens) % size == 0, "a checkpoint is not at the end of a block"
        assert names[-1] == name, "a checkpoint covers other tokens"


def play(workload: Workload, slots: Slots) -> set[str]:
    """Play a workload; the hard cases that it reached."""
    how = {"ahead": slots.ahead, "num_state_slots": workload.max_num_seqs + slots.extra}
    engine, seen = make_engine(workload, **how), set()
    engine.runner.launched = partial(look, engine, seen)
    run = workloads_of.stepper(workload, engine)

    def add(engine: FakeEngine, number: int, a: Arrival) -> None:
        prompt, max_tokens, how = request_of(engine, number, a)
        named = [position for position in slots.named if position <= len(prompt)]
        engine.add(prompt, max_tokens, checkpoints=named, **how)

    def step() -> None:
        if run():
            seen.add("failed")
        check_names(engine)

    aborted = workloads_of.play(workload, engine, step, add)
    engine.step()  # it may be of requests that have ended
    assert engine.scheduler.schedule().is_empty
    engine.check_blocks()
    assert engine.scheduler.kv.states.num_owned == 0, "a slot is lost"
    for name, request in engine.requests.items():
        if name not in aborted:
            assert answer_of(request) == expected(engine, request)
    return seen


@settings(max_examples=250)
@given(workloads() | workloads(pressed=True), slots_of)
def test_every_segment_finds_its_prefix_in_its_slot(workload, slots):
    play(workload, slots)


def test_the_workloads_reach_the_hard_cases():
    seen = set()
    for seed in range(120):
        slots = Slots([0, 1, 40][seed % 3], seed % 2 == 0, (5, 9))
        seen |= play(seeded_workload(seed, pressed=seed % 5 == 0), slots)
    assert seen == {"hit", "took a checkpoint over", "checkpoint inside", "preempted", "failed"}
