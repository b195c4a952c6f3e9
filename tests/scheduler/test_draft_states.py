"""Recurrent states of requests with drafts: each draft that fails finds the state before it."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.test_drafts import Sevens
from tests.scheduler.test_state_slot_properties import check_names
from tests.scheduler.test_state_slots import hit
from tests.support.engine import workloads as workloads_of
from tests.support.engine.fake_engine import FakeEngine, answer_of, expected, fake_config
from tests.support.engine.guesses import Guesses
from tests.support.engine.workloads import make_engine, seeded_workload, workloads
from vllm_metal_lite.config import MAX_MODEL_DRAFTS
from vllm_metal_lite.scheduler.scheduler_output import Segment


def make(num_slots: int, seats: int = 1, size: int = 4, **how) -> FakeEngine:
    config = fake_config(size, max_num_seqs=seats, **how)
    return FakeEngine(config, 200, 256, num_state_slots=num_slots)


def guessing(engine: FakeEngine, seed: int = 0, **how) -> Guesses:
    """Let an engine guess the answers of its requests."""
    truth = {name: expected(engine, r) for name, r in engine.requests.items()}
    engine.in_flight.speculator = guesses = Guesses(engine, truth, seed, **how)
    return guesses


def wrong_after(guesses: Guesses, length: int, right: int) -> None:
    """Make drafts of `length` tokens, the first `right` of them true."""
    guesses.right, guesses.longest = 1.0, 10**6
    guesses.random.randint = lambda low, high: length  # type: ignore[method-assign]
    guess = guesses._guess
    guesses._guess = lambda *args: [*guess(*args)[:right], *[90] * (length - right)][: args[1]]
    guesses.wants = lambda decodes: True


def states_of(segment: Segment) -> list[int]:
    """The positions of the states that a segment leaves."""
    return [*(at for at, _ in segment.state.checkpoints), segment.end]


def check(engine: FakeEngine, seen: set[str]) -> None:
    """At a launch: states before the first drafts, and at each end of a block."""
    out, size = engine.in_flight.outputs[0], engine.config.block_size
    for s in out.segments:
        if not s.draft_token_ids:
            continue
        states = [at for at in states_of(s) if at >= s.known_end]
        num_drafts = len(s.draft_token_ids)
        assert states[:-1] == [*range(s.known_end, s.known_end + len(states) - 1)]
        assert len(states) - 1 <= min(num_drafts, MAX_MODEL_DRAFTS)
        assert {at for at in range(s.known_end, s.end + 1) if at % size == 0} <= set(states)
        if len(states) - 1 == num_drafts:
            seen.add("all states")
        if s.end // size > -(-s.known_end // size):
            seen.add("a block ends inside")
        if s.known_end - s.num_computed > 1:
            seen.add("a replay")


def play(workload, extra: int, seed: int) -> set[str]:
    """Play a workload with `extra` slots beyond one a seat."""
    engine, truth = make_engine(workload, num_state_slots=workload.max_num_seqs + extra), {}
    engine.in_flight.speculator = Guesses(engine, truth, seed, longest=12)
    seen = set[str]()
    engine.runner.launched = lambda: check(engine, seen)
    run = workloads_of.stepper(workload, engine)

    def step() -> None:
        truth.update((r.request_id, expected(engine, r)) for r in engine.unfinished.values())
        if run():
            seen.add("failed")
        check_names(engine)

    aborted = workloads_of.play(workload, engine, step)
    engine.step()
    assert engine.scheduler.schedule().is_empty
    engine.check_blocks()
    assert engine.scheduler.kv.states.num_owned == 0, "a slot is lost"
    for name, request in engine.requests.items():
        if name not in aborted:
            assert answer_of(request)[: request.max_tokens] == expected(engine, request)
    if engine.scheduler.num_preemptions:
        seen.add("preempted")
    return seen


@given(
    workloads() | workloads(pressed=True),
    st.sampled_from([0, 1, 2, 3, 8, 60]),
    st.integers(0, 100),
)
@settings(max_examples=60)
def test_tokens_and_accounts_stay_with_any_number_of_slots(workload, extra, seed):
    play(workload, extra, seed)


def test_the_workloads_reach_the_hard_cases():
    seen = set[str]()
    for seed in range(60):
        seen |= play(seeded_workload(seed, pressed=seed % 3 == 0), [0, 2, 60][seed % 3], seed)
    assert seen == {"all states", "a block ends inside", "a replay", "failed", "preempted"}


@pytest.mark.parametrize("size", [1, 4, 16])
def test_drafts_with_a_slot_each_compute_no_token_twice(size):
    engine = make(40, seats=4, size=size)
    for i in range(4):
        engine.add([i] * (5 + i), 60)
    guessing(engine, longest=MAX_MODEL_DRAFTS)
    segments = [s for out in engine.run() for s in out.segments if not s.is_prompt]
    assert all(s.known_end == s.num_computed + 1 for s in segments)
    computed = {request: request.num_prompt_tokens for request in engine.requests.values()}
    for s in segments:
        assert s.num_computed >= computed[s.request]
        computed[s.request] = s.known_end
    assert sum(len(s.draft_token_ids) for s in segments) > 100
    for request in engine.requests.values():
        assert answer_of(request) == expected(engine, request)


@pytest.mark.parametrize(
    ("length", "right", "computed"),
    [(7, 0, 0), (7, 3, 3), (7, 6, 6), (7, 7, 7), (16, 6, 6), (16, 9, 6), (16, 15, 6), (16, 16, 16)],
)
def test_a_request_continues_from_the_latest_state_before_the_first_error(length, right, computed):
    """Behind the last of these states, accepted tokens are computed again."""
    engine = make(40, size=32)
    request = engine.add([1, 2, 3], 60)
    engine.step()
    wrong_after(guessing(engine), length, right)
    segment = engine.step().segments[0]
    assert (segment.known_end, segment.end) == (4, 4 + length)
    assert states_of(segment) == [*range(4, 4 + min(length, 7)), 4 + length]
    assert (request.num_computed_tokens, request.num_tokens) == (4 + computed, 5 + right)
    engine.in_flight.speculator = None
    (segment,) = engine.step().segments
    assert (segment.num_computed, segment.num_scheduled) == (4 + computed, 1 + right - computed)
    engine.run()
    assert answer_of(request) == expected(engine, request)


@pytest.mark.parametrize(
    ("spare", "shares"),
    [(0, []), (1, [1]), (2, [1, 1]), (5, [2, 2, 1]), (11, [4, 4, 3]), (30, [6, 6, 6])],
)
def test_requests_share_the_slots(spare, shares):
    """Those of the second and third may be fewer by one; a draft needs one."""
    engine = make(3 + spare, seats=3, size=32)
    for i in range(3):
        engine.add([i] * 5, 60)
    engine.step()
    engine.step()
    wrong_after(guessing(engine), 6, 6)
    out = engine.step()
    drafted = [s for s in out.segments if s.draft_token_ids]
    assert [len(s.state.checkpoints) for s in drafted] == shares
    assert all(len(s.draft_token_ids) == 6 for s in drafted)


def test_a_draft_takes_the_slots_that_shorter_ones_leave():
    engine = make(11, seats=3, size=32)
    for i in range(3):
        engine.add([i] * 5, 60)
    engine.step()
    guessing(engine).propose = lambda wanted: [[1], [], [1] * 7]
    out = engine.step()
    assert [len(s.state.checkpoints) for s in out.segments] == [0, 1, 7]


def test_the_next_turn_starts_where_a_block_ends_within_accepted_drafts():
    """Where no step ended, and although the drafts behind were wrong."""
    for right, cached in ((0, 4), (4, 8), (5, 8), (6, 8)):
        engine = make(40)
        request = engine.add([1, 2, 3], 60)
        engine.step()
        wrong_after(guessing(engine), 7, right)
        assert states_of(engine.step().segments[0])[0] == 4
        told = request.token_ids[: 5 + right]
        engine.abort(request.request_id)
        engine.step()
        assert hit(engine, [*told, 50, 51]) == cached


@pytest.mark.parametrize("right", [0, 3, 6])  # blocks end before all drafts, or within them
def test_an_answers_last_checkpoint_replaces_the_one_before(right):
    engine = make(40)
    request = engine.add([1, 2, 3], 100)
    engine.step()
    wrong_after(guessing(engine), 7, right)
    for _ in range(8):
        engine.step()
        assert len(engine.scheduler.kv.states._checkpoints) <= 1
    assert hit(engine, request.token_ids) == request.num_computed_tokens // 4 * 4


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a_draft_passes_no_end_of_a_block_without_a_state(size):
    engine = make(40, size=size)
    engine.add([1, 2, 3], 150)
    engine.in_flight.speculator = Sevens(engine.in_flight.seats.tokens_of)
    segments = [s for out in engine.run() for s in out.segments if s.draft_token_ids]
    longest = max(len(s.draft_token_ids) for s in segments)
    assert 7 <= longest < 7 + size
    for before, after in pairwise(segments):
        assert after.num_computed == before.known_end
