"""Drafts in the scheduler change no token, take no block that others need, and delay nobody."""

from contextlib import suppress
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine.fakes import FakeEngine, StepFailed, answer_of, expected, fake_config
from tests.support.engine.workloads import (
    MAX_MODEL_LEN,
    Workload,
    make_config,
    play_engine,
    workloads,
)


def guesses(engine, random, right=0.8):
    """Drafts that are the requests' true answers, with errors."""

    def propose(wanted):
        return [guess(request, most) for request, most in wanted]

    def guess(request, most):
        done = request.num_tokens - request.num_prompt_tokens
        true = expected(request, MAX_MODEL_LEN, engine.windows)[done:]
        length = min(most, random.randrange(6))
        return [t if random.random() < right else t + 1 for t in true[:length]]

    return propose


def play(workload: Workload, seed: int) -> None:
    config, groups = make_config(workload)
    engine, random = FakeEngine(config, groups, MAX_MODEL_LEN), Random(seed)
    engine.propose = guesses(engine, random)
    steps = count()

    def step() -> None:
        out = engine.schedule()
        check(engine, out)
        with suppress(StepFailed):
            engine.execute(out, fail=next(steps) in workload.failures)
        engine.check_blocks()

    aborted = play_engine(workload, engine, step)
    for number, request in engine.requests.items():
        if number not in aborted:
            assert answer_of(request)[: request.max_tokens] == expected(
                request, MAX_MODEL_LEN, engine.windows
            )


def check(engine, out):
    """The rows and blocks that a step with drafts may take."""
    drafted = [s for s in out.segments if s.draft_token_ids]
    if not drafted:
        return
    assert out.total_num_scheduled_tokens <= engine.scheduler.config.max_num_batched_tokens
    assert out.total_num_scheduled_tokens == sum(s.num_scheduled for s in out.segments)
    lengths = [s.num_scheduled for s in out.segments]
    assert all(n == 1 for n in lengths[: out.num_decodes])
    assert sorted(n > 1 for n in lengths) == [n > 1 for n in lengths], "decodes come first"
    for segment in drafted:
        assert segment.known_end == segment.request.num_tokens
        assert segment.end < segment.request.max_length
        assert segment.end <= segment.request.num_blocks * engine.block_size


@given(workloads(), st.integers(0, 100))
@settings(max_examples=60)
def test_tokens_are_those_of_the_request_alone(workload, seed):
    play(workload, seed)


@pytest.mark.parametrize("num_blocks", [8, 9, 30])
def test_drafts_take_no_block_that_a_running_request_may_need(num_blocks):
    """Two requests that just fit: neither is preempted because of the other's drafts."""
    engine = FakeEngine(fake_config(4, max_num_seqs=2), num_blocks, 32)
    engine.propose = lambda wanted: [[7] * most for _, most in wanted]
    for _ in range(2):
        engine.add([1, 2, 3], 13)
    steps = engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert any(out.has_drafts for out in steps)


def test_true_drafts_take_one_step_for_several_tokens():
    engine = FakeEngine(fake_config(4, max_num_seqs=2), 40, 64)
    engine.propose = guesses(engine, Random(0), right=1.0)
    request = engine.add([1, 2, 3], 28)
    steps = engine.run()
    assert answer_of(request) == expected(request, 64)
    assert len(steps) < 16
    assert sum(out.num_decodes for out in steps) < 12


def test_drafts_use_what_a_step_leaves_over():
    """A prompt beside them is computed as fast as without."""
    chunks = []
    for propose in (None, lambda wanted: [[7] * most for _, most in wanted]):
        engine = FakeEngine(fake_config(4, max_num_seqs=2, max_num_batched_tokens=6), 60, 64)
        engine.add([1, 2, 3], 20)
        engine.step()
        engine.propose = propose
        prompt = engine.add(list(range(30)), 1)
        steps = [engine.step() for _ in range(6)]
        mine = [[s.num_scheduled for s in out.segments if s.request is prompt] for out in steps]
        assert all(out.total_num_scheduled_tokens <= 6 for out in steps)
        chunks.append(mine)
    assert chunks[0] == chunks[1] == [[5]] * 6
