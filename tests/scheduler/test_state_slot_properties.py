"""State slots under random workloads.

The device is a dict: slot -> the tokens that its state covers.  Each segment must find its own
prefix, and no other, in its initial slot; each checkpoint must cover the tokens of its name.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine import workloads as workloads_of
from tests.support.engine.pool_accounts import check_accounts
from tests.support.engine.workloads import (
    MAX_MODEL_LEN,
    Arrival,
    Workload,
    make_config,
    request_of,
    seeded_workload,
    workloads,
)
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT
from vllm_metal_lite.scheduler import checkpoints, following
from vllm_metal_lite.scheduler.prefix_hash import extend_block_names
from vllm_metal_lite.scheduler.request import Request, RequestStatus
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

UNWRITTEN = (-1,)


@dataclass(frozen=True)
class Slots:
    """extra: slots beyond one per seat.  ahead: steps are scheduled before the last tokens are
    known.  named: positions that every caller names."""

    extra: int
    ahead: bool
    shares_in_step: bool
    named: tuple[int, ...]


slots_of = st.builds(
    Slots,
    extra=st.sampled_from([0, 0, 1, 2, 3, 6, 40]),
    ahead=st.booleans(),
    shares_in_step=st.booleans(),
    named=st.lists(st.integers(1, MAX_MODEL_LEN), max_size=3).map(tuple),
)


@pytest.fixture(scope="module", autouse=True)
def short_intervals() -> Iterator[None]:
    """Prompts of this file are short: disposable checkpoints and waiting must happen in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "INTERVAL", 6)
        patch.setattr(following, "WORTH_WAITING", 2)
        yield


def answer(prompt: list[int], max_tokens: int) -> list[int]:
    """A prompt and its answer; the next token depends on all tokens, and many answers are alike."""
    tokens = list(prompt)
    for _ in range(min(max_tokens, MAX_MODEL_LEN - len(prompt))):
        tokens.append((sum(tokens) * 7 + len(tokens)) % 3)
    return tokens


@dataclass
class Device:
    """Steps in the engine's order over slots that hold token tuples."""

    workload: Workload
    slots: Slots
    scheduler: Scheduler = field(init=False)
    states: list[tuple[int, ...]] = field(init=False)
    truth: dict[str, list[int]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    flying: deque[SchedulerOutput] = field(default_factory=deque)
    num_launched: int = 0
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        config, groups = make_config(self.workload)
        num_slots = self.workload.max_num_seqs + self.slots.extra
        how = {"num_state_slots": num_slots, "shares_in_step": self.slots.shares_in_step}
        self.scheduler = Scheduler(config, groups, MAX_MODEL_LEN, **how)
        self.states = [UNWRITTEN] * num_slots

    def add(self, number: int, a: Arrival) -> None:
        prompt, max_tokens, how = request_of(number, a)
        how["checkpoint_positions"] = tuple(p for p in self.slots.named if p <= len(prompt))
        request = Request(how.pop("request_id"), prompt, max_tokens, **how)
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.truth[request.request_id] = answer(prompt, max_tokens)

    def abort(self, name: str) -> None:
        request = self.requests.get(name)
        if request and request.status is not RequestStatus.FINISHED:
            self.aborted.add(name)
            self.scheduler.finish(request)
            self.check()

    def launch(self) -> None:
        out = self.scheduler.schedule()
        self.check()
        if out.preempted:
            self.seen.add("preempted")
        if out.is_empty:
            return
        self.flying.append(out)
        self.num_launched += 1
        used: list[set[int]] = []
        written: dict[int, tuple[int, ...]] = {}
        for s in out.segments:
            tokens, state = tuple(self.truth[s.request.request_id]), s.state
            assert state is not None, "the model keeps states"
            start, end = s.num_computed, s.num_computed + s.num_scheduled
            assert (state.initial == EMPTY_SLOT) == (start == 0)
            if start:
                assert self.states[state.initial] == tokens[:start], "another prefix's state"
            mine = {state.final: tokens[:end]}
            for position, slot in state.checkpoints:
                assert start < position < end
                assert slot not in (*mine, state.initial), "a slot is written twice"
                mine[slot] = tokens[:position]
            assert not written.keys() & mine.keys(), "two segments write a slot"
            written |= mine
            used.append(set(mine) | {state.initial} - {EMPTY_SLOT})
            if s.request in out.admitted and start:
                self.seen.add("hit")
                if state.initial == state.final:
                    self.seen.add("took a checkpoint over")
            if state.checkpoints:
                self.seen.add("checkpoint inside")
        for s, mine in zip(out.segments, used, strict=True):
            assert s.state is not None
            others = {slot for slots in used if slots is not mine for slot in slots}
            own = {s.state.final, *(slot for _, slot in s.state.checkpoints)}
            assert not own & others, "a segment reads or writes a slot that another writes"
        for slot, state_tokens in written.items():
            self.states[slot] = state_tokens

    def step(self) -> None:
        if not self.flying:
            self.launch()
        if not self.flying:
            return
        self.advance(self.flying[0])
        if self.slots.ahead and not self.scheduler.may_preempt():
            self.launch()
        if self.num_launched in self.workload.failures:
            self.fail()
        else:
            self.finish(self.flying.popleft())

    def advance(self, out: SchedulerOutput) -> None:
        self.scheduler.advance(out)
        self.check()
        self.check_names()

    def finish(self, out: SchedulerOutput) -> None:
        tokens = []
        at = {s.request.request_id: s.num_computed + s.num_scheduled for s in out.segments}
        for request in out.terminal:
            truth, end = self.truth[request.request_id], at[request.request_id]
            tokens.append(truth[end] if end < len(truth) else 0)
        self.scheduler.update(out, tokens)
        for request in out.terminal:
            goes_on = request.status is not RequestStatus.FINISHED
            if goes_on and at[request.request_id] + 1 == request.max_length:
                self.scheduler.finish(request)
        self.check()

    def fail(self) -> None:
        """All steps in flight fail: what they wrote is lost."""
        self.seen.add("failed")
        for s in (s for out in self.flying for s in out.segments):
            assert s.state is not None
            for slot in (s.state.final, *(slot for _, slot in s.state.checkpoints)):
                self.states[slot] = UNWRITTEN
        self.scheduler.rollback(*self.flying)
        self.flying.clear()
        self.num_launched += 1  # the same number must not fail again
        self.check()
        self.check_names()

    def check(self) -> None:
        check_accounts(self.scheduler.kv, self.requests.values())

    def check_names(self) -> None:
        """Every checkpoint covers exactly the tokens of its name."""
        slots = self.scheduler.kv.states
        assert slots is not None
        size = self.workload.block_size
        for name, slot in slots.pool._by_name.items():
            names: list[bytes] = []
            tokens = self.states[slot]
            extend_block_names(names, tokens, size, len(tokens) // size)
            assert len(tokens) % size == 0, "a checkpoint is not at the end of a block"
            assert names[-1] == name, "a checkpoint covers other tokens"


def play(workload: Workload, slots: Slots) -> Device:
    device = Device(workload, slots)
    scheduler = device.scheduler
    workloads_of.play(workload, scheduler, device.add, device.abort, device.step)
    device.flying.clear()
    assert scheduler.schedule().is_empty
    device.check()
    states = scheduler.kv.states
    assert states is not None
    assert states.pool.num_owned == 0, "a slot is lost"
    for name, request in device.requests.items():
        if name not in device.aborted:
            assert request.token_ids == device.truth[name]
    return device


@settings(max_examples=250)
@given(workloads() | workloads(pressed=True), slots_of)
def test_every_segment_finds_its_prefix_in_its_slot(workload, slots):
    play(workload, slots)


def test_the_workloads_reach_the_hard_cases():
    seen = set()
    for seed in range(120):
        slots = Slots([0, 1, 40][seed % 3], seed % 2 == 0, seed % 4 < 2, (5, 9))
        seen |= play(seeded_workload(seed, pressed=seed % 5 == 0), slots).seen
    assert seen == {"hit", "took a checkpoint over", "checkpoint inside", "preempted", "failed"}
