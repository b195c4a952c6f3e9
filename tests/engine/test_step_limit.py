"""`max_step_seconds`: chunks and drafts follow the times of steps, under a clock of the tests."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.engine.fake_engine import FakeEngine, answer_of, expected, fake_config
from tests.support.engine.rank_threads import run as run_ranks
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.batch.pictures import PlacedPictures
from vllm_metal_lite.config import PREFILL_POLICIES
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.engine import steps_in_flight
from vllm_metal_lite.runner import result
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput, Segment
from vllm_metal_lite.scheduler.step_limit import StepLimit

SECONDS = 0.5


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves while a step is waited for.  cost: the seconds of a step, by its batch."""
    clock = SimpleNamespace(now=100.0, cost=lambda batch: 0.01)
    wait = result.StepResult.wait

    def slow(step):
        clock.now += 0 if step.done else clock.cost(step.batch)
        wait(step)

    monkeypatch.setattr(result.StepResult, "wait", slow)
    for module in (result, steps_in_flight):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def slow_machine(batch: ForwardBatch) -> float:
    """0.05 seconds, 2 ms a row, and 10 us for each token that a row sees."""
    return 0.05 + 0.002 * batch.num_tokens + 1e-5 * int(batch.positions.sum())


def chunks(steps: list[SchedulerOutput], request: Request) -> list[tuple[int, float]]:
    """(Tokens, seconds) of the request's chunks."""
    return [
        (s.num_scheduled, out.seconds)
        for out in steps
        for s in out.segments
        if s.request is request and s.is_prompt
    ]


def fake(**options) -> FakeEngine:
    config = fake_config(16, max_step_seconds=SECONDS, enable_prefix_caching=False, **options)
    return FakeEngine(config, 200, max_model_len=2048, ahead=True)


def test_steps_beside_a_long_prompt_become_shorter_than_the_limit(clock):
    clock.cost = slow_machine
    engine = fake()
    streams = [engine.add([1], 60), engine.add([2], 60)]
    for _ in range(4):
        engine.step()
    prompt = engine.add([3] * 1000, 4)
    steps = engine.run()
    sizes = chunks(steps, prompt)
    assert max(seconds for _, seconds in sizes[4:]) <= SECONDS
    assert min(seconds for _, seconds in sizes[4:-1]) > SECONDS / 2  # and not much shorter
    assert sizes[4][0] > sizes[-2][0], "chunks become shorter with the context"
    for request in (*streams, prompt):
        assert answer_of(request) == expected(engine, request)


def test_a_prompt_alone_gets_more_and_a_pause_is_not_a_step(clock):
    clock.cost = slow_machine
    engine = fake()
    sizes = []
    for _ in range(3):
        clock.now += 1000
        prompt = engine.add([3] * 900, 1)
        sizes += chunks(engine.run(), prompt)
    assert SECONDS < max(seconds for _, seconds in sizes[4:]) < 2 * SECONDS


def test_a_fast_machine_is_not_limited_for_long(clock):
    clock.cost = lambda batch: slow_machine(batch) / 1000
    engine = fake()
    engine.add([1], 60)
    engine.step()
    engine.add([4] * 20, 1)
    for _ in range(8):
        engine.step()
    prompt = engine.add([3] * 1000, 4)
    assert [n for n, _ in chunks(engine.run(), prompt)] == [1000]


def output(rows: int, context: int, seconds: float) -> SchedulerOutput:
    request = Request("r", [1] * 8, 1)
    return SchedulerOutput([Segment(request, context, rows, ())], 0, rows, seconds=seconds)


def rows_left(limit: StepLimit, context: int = 0) -> int:
    return limit.rows_left(SchedulerOutput(), context, is_alone=False)


def test_the_first_step_of_a_width_lowers_nothing():
    """That step may have compiled."""
    limit = StepLimit(1.0, compiles=True)
    before = rows_left(limit)
    limit.record(output(200, 0, 8.0))
    assert rows_left(limit) == before
    limit.record(output(200, 0, 1.0))
    assert rows_left(limit) == 160
    limit.record(output(90, 0, 0.01))
    assert rows_left(limit) == 7200


def test_the_time_of_a_vision_tower_is_no_time_of_rows():
    limit = StepLimit(1.0, compiles=False)
    before = rows_left(limit)
    step = output(64, 0, 8.0)
    step.segments[0].request.pictures = PlacedPictures((), (), np.array([40, 41]), np.array([2]))
    limit.record(step)
    assert rows_left(limit) == before
    step.segments[0].num_computed = 41  # the rest of the picture, whose features are known
    limit.record(step)
    assert rows_left(limit) < before


def test_short_chunks_do_not_let_long_contexts_in():
    limit = StepLimit(1.0, compiles=True)
    limit.record(output(200, 0, 0.01))
    assert rows_left(limit) == 16_000
    assert rows_left(limit, 100_000) < 200


class ShortSteps(StepLimit):
    first, least = 8, 2


@pytest.mark.parametrize("policy", PREFILL_POLICIES)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "granitemoehybrid"])
def test_tokens_are_the_same_at_any_speed(clock, name, policy):
    """Few blocks, drafts, scored prompts and spans beside plain ones."""
    random = Random(0)
    clock.cost = lambda batch: random.choice([0.001, 0.1, 1.0, 5.0])
    limited = {"max_step_seconds": SECONDS, "num_blocks": 9, "speculate": "auto"}
    engine = tiny.engine(name, prefill_policy=policy, **limited)
    engine.scheduler.limit = ShortSteps(SECONDS, compiles=False)
    seen = []
    engine.on_step = seen.append
    prompts = tiny.prompts(6, 10, 40)
    engine.add_request("scored", prompts[0], tiny.greedy(4, prompt_logprobs=0))
    whole = {"prompt_token_ids": prompts[1], "spans": [(0, None)]}
    engine.add_request("span", whole, tiny.greedy(4, ignore_eos=True))
    tiny.submit(engine, prompts, 24)
    done = tiny.run(engine)
    outputs = [done[str(i)] for i in range(len(prompts))]
    assert tiny.tokens_of(outputs) == tiny.all_alone(name, prompts, 24)
    (span,) = tiny.tokens_of([done["span"]])
    assert [span] == tiny.all_alone(name, prompts[1:2], 4)
    assert len({s.num_scheduled for out in seen for s in out.segments}) > 8
    assert engine.metrics()["blocks_owned"] == 0


def test_a_span_is_computed_whole(clock):
    clock.cost = slow_machine
    engine = fake()
    engine.add([1], 60)
    prompt = engine.add([3] * 900, 1, spans=[(100, 800)])
    assert 700 in [n for n, _ in chunks(engine.run(), prompt)]


def test_drafts_stay_within_the_limit(clock):
    engine = fake()
    requests = [engine.add([1 + i], 60) for i in range(8)]
    tiny.run_ahead(engine, False)
    while len(engine.scheduler.decodes) < len(requests):
        engine.step()

    def num_drafts(limit: StepLimit | None) -> int:
        engine.scheduler.limit = limit
        out = engine.scheduler.schedule(lambda wanted: [[7] * min(most, 31) for _, most in wanted])
        engine.scheduler.advance(out)
        accepted: dict = {s.request: [] for s in out.segments}
        engine.scheduler.update(out, [7] * len(out.terminal), accepted)
        return sum(len(s.draft_token_ids) for s in out.segments)

    limit = StepLimit(1.0, compiles=True)
    for _ in range(4):  # each lowers the rows by half
        limit.record(output(200 if rows_left(limit) > 200 else rows_left(limit), 0, 8.0))
    assert num_drafts(None) == 8 * 31
    assert num_drafts(limit) <= rows_left(limit) < 8 * 31


def _measures(ranks: RankGroup) -> bool:
    model = replace(tiny.packed("llama"), ranks=ranks)
    return tiny.engine(model, max_step_seconds=SECONDS).scheduler.limit is not None


def test_ranks_do_not_measure_each_for_itself():
    """Their chunks would differ."""
    assert run_ranks(_measures) == [False, False]
    assert _measures(ALONE)
