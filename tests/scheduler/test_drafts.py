"""Drafts in the scheduler change no token, take no block that others need, and delay nobody."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine import workloads as workloads_of
from tests.support.engine.fake_engine import FakeEngine, answer_of, expected, fake_config
from tests.support.engine.guesses import Guesses
from tests.support.engine.workloads import Workload, make_engine, workloads
from vllm_metal_lite.speculation.speculator import Speculator


def play(workload: Workload, seed: int) -> None:
    engine, truth = make_engine(workload), {}
    engine.in_flight.speculator = Guesses(engine, truth, seed)
    engine.runner.launched = lambda: check(engine, engine.in_flight.outputs[0])
    run = workloads_of.stepper(workload, engine)

    def step() -> None:
        truth.update((r.request_id, expected(engine, r)) for r in engine.unfinished.values())
        run()

    aborted = workloads_of.play(workload, engine, step)
    for name, request in engine.requests.items():
        if name not in aborted:
            assert answer_of(request)[: request.max_tokens] == expected(engine, request)


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
        assert segment.end <= segment.request.num_blocks * engine.config.block_size


@given(workloads(), st.integers(0, 100))
@settings(max_examples=60)
def test_tokens_are_those_of_the_request_alone(workload, seed):
    play(workload, seed)


class Sevens(Speculator):
    """Drafts as long as may be, and wrong."""

    def propose(self, wanted):
        return [[7] * most for _, most in wanted]


@pytest.mark.parametrize("num_blocks", [8, 9, 30])
def test_drafts_take_no_block_that_a_running_request_may_need(num_blocks):
    """Two requests that just fit: neither is preempted because of the other's drafts."""
    engine = FakeEngine(fake_config(4, max_num_seqs=2), num_blocks, 32)
    engine.in_flight.speculator = Sevens(engine.in_flight.seats.tokens_of)
    for _ in range(2):
        engine.add([1, 2, 3], 13)
    steps = engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert any(out.has_drafts for out in steps)


def test_looked_up_drafts_take_the_blocks_of_their_rows_alone():
    engine = FakeEngine(fake_config(4, max_num_seqs=2), 60, 200)
    engine.in_flight.speculator = Sevens(engine.in_flight.seats.tokens_of)
    engine.add([1, 2, 3], 150)
    last = max(s.end for out in [engine.step() for _ in range(4)] for s in out.segments)
    assert engine.scheduler.kv.pools[0].peak_owned == -(-last // 4)


def test_drafts_use_what_a_step_leaves_over():
    """A prompt beside them is computed as fast as without."""
    chunks = []
    for drafts in (False, True):
        engine = FakeEngine(fake_config(4, max_num_seqs=2, max_num_batched_tokens=6), 60, 64)
        engine.add([1, 2, 3], 20)
        engine.step()
        engine.in_flight.speculator = Sevens(engine.in_flight.seats.tokens_of) if drafts else None
        prompt = engine.add(list(range(30)), 1)
        steps = [engine.step() for _ in range(6)]
        mine = [[s.num_scheduled for s in out.segments if s.request is prompt] for out in steps]
        assert all(out.total_num_scheduled_tokens <= 6 for out in steps)
        chunks.append(mine)
    assert chunks[0] == chunks[1] == [[5]] * 6


@pytest.mark.parametrize("num_blocks", [8, 9])
def test_wrong_drafts_keep_no_block_that_a_prompt_needs(num_blocks):
    admitted = []
    for drafts in (False, True):
        engine = FakeEngine(fake_config(4, max_num_seqs=2), num_blocks, 64)
        engine.in_flight.speculator = Sevens(engine.in_flight.seats.tokens_of) if drafts else None
        engine.add([1, 2, 3], 28)
        steps = [engine.step() for _ in range(3)]
        assert steps[-1].has_drafts == drafts
        late = engine.add([5, 6, 7], 6)
        admitted.append([late in engine.step().admitted for _ in range(3)])
    assert admitted[1] == admitted[0] == [True, False, False]


@pytest.mark.parametrize("num_blocks", [7, 60])
def test_ctrl_c_while_drafts_are_made_loses_nothing(num_blocks):
    """Also where the same step admits a request, or preempts one."""

    def interrupted(wanted):
        raise KeyboardInterrupt

    preempts = []
    for at in range(1, 24):
        engine = FakeEngine(fake_config(4, max_num_seqs=3), num_blocks, 64)
        requests = [engine.add([1, 2, 3], 20), engine.add([4, 5], 12)]
        for _ in range(at):
            engine.step()
            if len(requests) == 2:
                requests.append(engine.add([6], 9))
        engine.in_flight.speculator = drafts = Sevens(engine.in_flight.seats.tokens_of)
        drafts.propose = interrupted
        before = engine.scheduler.num_preemptions
        with suppress(KeyboardInterrupt):
            engine.step()
            continue  # no decode was left
        preempts.append(engine.scheduler.num_preemptions > before)
        engine.check_blocks()
        engine.in_flight.speculator = None
        engine.run()
        for request in requests:
            assert answer_of(request) == expected(engine, request)
    assert any(preempts) == (num_blocks == 7)
    assert len(preempts) > 10


def test_a_request_that_is_admitted_behind_its_prompt_has_no_drafts_yet():
    """Its prompt is cached, and its answer's first tokens are forced.  It has no seat yet."""
    engine = FakeEngine(fake_config(4, max_num_seqs=2, enable_prefix_caching=True), 60, 64)
    engine.in_flight.speculator = Sevens(engine.in_flight.seats.tokens_of)
    engine.add([1, 2, 3, 4, 5, 6, 7, 8], 2)
    engine.run()
    request = engine.add([1, 2, 3, 4], 20)
    request.token_ids += [5, 6]
    out = engine.step()
    assert out.admitted == [request]
    assert [(s.num_computed, s.num_scheduled, s.is_prompt) for s in out.segments] == [(4, 2, False)]
    assert engine.step().has_drafts
