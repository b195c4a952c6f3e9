"""Launching one step ahead changes neither the tokens of a request nor the owner of a block."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.engine import workloads as workloads_of
from tests.support.engine.fake_engine import FakeEngine, answer_of, expected, fake_config, shape
from tests.support.engine.fake_model import VOCAB_SIZE
from tests.support.engine.pool_accounts import check_accounts
from tests.support.engine.workloads import Workload, make_engine, seeded_workload, workloads
from tests.support.models import tiny_models as tiny
from tests.support.run_python import run_python
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.request import RequestStatus
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

# Over a fake model


def is_eos(token: int) -> bool:
    """Whether a token is a stop token.  Answers end there too; the scheduler cannot predict it."""
    return token % 29 == 0


class StoppingEngine(FakeEngine):
    """One step ahead.  num_dropped: rows whose request had ended when their tokens were known."""

    num_dropped = 0

    def __init__(self, *args) -> None:
        super().__init__(*args, ahead=True, stops=[*filter(is_eos, range(VOCAB_SIZE))])

    def _finish(self, step):
        ended = (r.status is RequestStatus.FINISHED for r in step.scheduled.terminal)
        self.num_dropped += sum(ended)
        return super()._finish(step)


def play(seed: int) -> StoppingEngine:
    """Random requests, aborts and failures, under pressure of blocks or not."""
    workload = seeded_workload(seed, pressed=seed % 2 == 0)
    engine = make_engine(workload, StoppingEngine)
    aborted = workloads_of.play(workload, engine)
    for name, request in engine.requests.items():
        answer, tokens = answer_of(request), expected(engine, request)
        end = next((i for i, token in enumerate(tokens) if is_eos(token)), len(tokens))
        assert answer == tokens[: len(answer) if name in aborted else end + 1]
    check_accounts(engine.scheduler.kv, [])
    return engine


@pytest.mark.long
def test_any_workload_gives_every_request_its_own_tokens():
    engines = [play(seed) for seed in range(400)]
    assert sum(e.in_flight.pipeline.num_ahead for e in engines) > 8000
    assert sum(e.num_dropped for e in engines) > 150
    assert sum(e.scheduler.num_preemptions for e in engines) > 20
    assert sum(e.scheduler.counts.prefix_cache_hit_tokens for e in engines) > 800


def noted(engine: FakeEngine) -> list[list[tuple[str, int, int]]]:
    """A list that gets the shape of each step from now on."""
    shapes, schedule = [], engine.scheduler.schedule

    def noting(*args) -> SchedulerOutput:
        out = schedule(*args)
        shapes.append(shape(out))
        return out

    engine.scheduler.schedule = noting
    return shapes


def steps_of(engine: FakeEngine, workload: Workload) -> list[list[tuple[str, int, int]]]:
    """What each step computes.  Requests arrive when a number of steps has been scheduled, which is
    what an engine that is one step ahead and one that is not have in common."""
    steps, schedule = [], engine.scheduler.schedule

    def arrive() -> None:
        for i, a in enumerate(workload.arrivals):
            if a.step <= len(steps) and str(i) not in engine.requests:
                workloads_of.add_to(engine, i, a)

    def scheduling(*args) -> SchedulerOutput:
        arrive()
        out = schedule(*args)
        if not out.is_empty:
            steps.append(shape(out))
        return out

    engine.scheduler.schedule = scheduling
    while len(engine.requests) < len(workload.arrivals) or engine.unfinished:
        if not engine.unfinished:
            arrive()
        if not engine.unfinished:
            steps.append([])  # nothing to do before the next one comes
            continue
        engine.step()
        engine.check_blocks()
    return steps


@given(workloads(calm=True))
@settings(max_examples=150)
def test_steps_are_those_of_an_engine_that_waits_for_tokens(workload):
    """Chunks, mixed steps, preemptions, policies: where no answer ends before its length, nothing
    is decided otherwise.  (A block that a step ahead completes is found one step later: no cache.)
    """
    workload = replace(workload, caching=False)
    waiting, ahead = (make_engine(workload, ahead=ahead) for ahead in (False, True))
    assert steps_of(ahead, workload) == steps_of(waiting, workload)
    assert ahead.scheduler.num_preemptions == waiting.scheduler.num_preemptions
    assert ahead.scheduler.counts.recomputed_tokens == waiting.scheduler.counts.recomputed_tokens
    for request in ahead.requests.values():
        assert answer_of(request) == expected(ahead, request)


def launch(engine: FakeEngine) -> SchedulerOutput:
    """The next step, before anything waits for its tokens."""
    engine.in_flight.launch(engine.scheduler.schedule())
    return engine.in_flight.outputs[-1]


def running(num_blocks: int = 100, waiting: int = 0, max_tokens: int = 4, **options) -> tuple:
    """Two requests that decode, and a step of theirs under way."""
    config = fake_config(**{"max_num_batched_tokens": 64, "max_num_seqs": 2, **options})
    engine = FakeEngine(config, num_blocks, 64)
    requests = [engine.add([i] * 3, max_tokens + i) for i in range(2)]
    engine.step()
    for i in range(waiting):
        engine.add([9 + i], 4)
    launch(engine)
    engine.in_flight.advance()
    return engine, requests


def test_decodes_go_on_with_tokens_that_are_not_known_yet():
    engine, requests = running()
    assert [r.token_ids[-1] for r in requests] == [UNKNOWN_TOKEN] * 2
    ahead = launch(engine)
    assert shape(ahead) == [("r0", 4, 1), ("r1", 4, 1)]
    assert [len(s.new_block_ids[0]) for s in ahead.segments] == [1, 1]  # blocks of 4: a second
    assert ahead.num_decodes == 2


def test_a_chunk_goes_on_and_the_last_one_is_followed_by_a_decode():
    engine = FakeEngine(fake_config(max_num_batched_tokens=4), 100, 64, ahead=True)
    request, shapes = engine.add([7] * 6, 3), noted(engine)
    engine.step()
    assert shapes == [[("r0", 0, 4)], [("r0", 4, 2)]]
    engine.step()
    assert shapes[2:] == [[("r0", 6, 1)]]
    engine.run()
    assert shapes[3:] == [[("r0", 7, 1)], []]
    assert answer_of(request) == expected(engine, request)


def test_whose_last_token_is_under_way_leaves_its_seat_and_blocks_to_others():
    engine, (first, second) = running(waiting=1, max_tokens=2)
    seats = engine.in_flight.seats.req_index
    assert first not in seats
    assert (first.num_blocks, first.status) == (0, RequestStatus.RUNNING)
    ahead = launch(engine)
    assert shape(ahead) == [("r1", 4, 1), ("r2", 0, 1)]
    newcomer = ahead.admitted[0]
    assert seats[newcomer] != seats[second]


def test_a_waiting_request_joins_the_step_ahead():
    engine, _ = running(waiting=2, max_num_seqs=3)
    engine.abort("r2")  # it was admitted, and its prompt is under way
    assert shape(launch(engine)) == [("r0", 4, 1), ("r1", 4, 1), ("r3", 0, 1)]


def test_tokens_are_waited_for_when_somebody_must_be_preempted():
    engine, _ = running(num_blocks=5, max_tokens=9)
    while engine.in_flight.outputs[0].segments[0].num_computed < 7:
        assert not engine.scheduler.may_preempt()
        engine._finish(engine.in_flight.finish())
        launch(engine)
        engine.in_flight.advance()
    assert engine.scheduler.kv.pools[0].num_available == 1  # and two want one
    assert engine.scheduler.may_preempt()
    assert engine.scheduler.kv.pools[0].num_available == 1


def test_a_failure_takes_back_both_steps_and_loses_nothing():
    """One request decodes, one waits for its last token, and the step ahead has admitted one."""
    engine, (first, second) = running(waiting=1, max_tokens=2, enable_prefix_caching=True)
    assert shape(launch(engine)) == [("r1", 4, 1), ("r2", 0, 1)]
    engine.in_flight.rollback()
    engine.check_blocks()
    assert len(engine.scheduler.waiting) == 3
    assert [r.num_computed_before for r in (first, second)] == [3, 3]
    assert UNKNOWN_TOKEN not in first.token_ids + second.token_ids
    engine.run()
    for request in engine.requests.values():
        assert answer_of(request) == expected(engine, request)


# The engine


VARIANTS = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "seeds": {"seed": 34, "top_p": 0.9, "min_p": 0.01},
    "min_tokens": {"seed": 4, "min_tokens": 9, "logit_bias": {7: 2.0}},
    "logprobs": {"seed": 5, "logprobs": 2, "prompt_logprobs": 1, "presence_penalty": 0.5},
    "allowed": {"seed": 6, "allowed_token_ids": list(range(0, 90, 2))},
    "n": {"seed": 7, "n": 3},
}


@pytest.mark.parametrize("name", ["llama", "granitemoehybrid"])
@pytest.mark.parametrize("budget", [48, 12])
@pytest.mark.parametrize("how", VARIANTS)
def test_an_engine_gives_the_same_tokens_with_and_without(name, how, budget):
    """The runs have chunks, stop tokens, arrivals, aborts, preemptions and prefix cache hits."""
    answers, metrics = [], []
    for ahead in (False, True):
        engine = tiny.engine(name, num_blocks=24, max_num_batched_tokens=budget, max_num_seqs=5)
        tiny.run_ahead(engine, ahead)
        rng = np.random.default_rng(1)
        done, prompts = {}, tiny.prompts(10, 3, 30, seed=2)
        for i, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=int(rng.integers(9, 40)),
                stop_token_ids=rng.integers(0, 101, 6).tolist(),
                **VARIANTS[how],
            )
            engine.add_request(str(i), prompt, params)
            for _ in range(rng.integers(0, 9)):
                done |= tiny.step(engine)
            if i == 7:
                engine.abort(str(i))
        done |= tiny.run(engine)
        outputs = [done[str(i)] for i in range(10) if i != 7]
        ended = [o for r in outputs for o in r.outputs]
        answers.append(
            [(o.token_ids, o.finish_reason, o.stop_reason, len(o.logprobs or ())) for o in ended]
        )
        for i, output in zip([*range(7), 8, 9], outputs, strict=True):
            scored = [next(iter(p)) for p in (output.prompt_logprobs or [None])[1:]]
            assert scored == (prompts[i][1:] if output.prompt_logprobs else [])
        metrics.append(engine.metrics())
    assert answers[0] == answers[1]
    assert {reason for _, reason, _, _ in answers[0]} == {"stop", "length"}
    assert metrics[0]["steps_ahead"] == 0
    assert metrics[1]["steps_ahead"] > 10
    assert metrics[0]["decode_tokens"] == metrics[1]["decode_tokens"]


def test_the_host_reads_a_steps_tokens_when_the_next_one_is_built():
    engine = tiny.engine()
    order = []
    execute, finish = engine.runner.execute, engine._finish
    engine.runner.execute = lambda *a: (order.append("run"), execute(*a))[1]
    engine._finish = lambda *a: (order.append("read"), finish(*a))[1]
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=3))
    tiny.run(engine)
    assert order == ["run", *["run", "read"] * 2, "read"]  # a prompt and two decodes


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("llama", "mixed"),
        ("llama", "alternate"),
        ("llama", "whole"),
        ("gemma3_text", "mixed"),
        ("granitemoehybrid", "mixed"),
        ("gpt_oss", "mixed"),
    ],
)
def test_in_a_load_of_prompts_every_step_but_the_first_is_ahead(name, policy):
    """There are chunks, mixed steps and fewer seats than prompts, and nothing waits for a token."""
    options = {"num_blocks": 40, "max_num_batched_tokens": 24, "long_prefill_token_threshold": 16}
    engine = tiny.engine(name, max_num_seqs=3, prefill_policy=policy, **options)
    prompts, counts = tiny.prompts(9, 3, 40, seed=5), [1 + i % 4 for i in range(9)]
    answers = tiny.answers(engine, prompts, [tiny.greedy(n) for n in counts])
    alone = zip(prompts, counts, strict=True)
    assert answers == [tiny.alone(tiny.native(name), prompt, n) for prompt, n in alone]
    metrics = engine.metrics()
    assert metrics["steps_ahead"] == metrics["steps"] - 1
    assert metrics["prefill_tokens"] == sum(map(len, prompts))


def test_rows_for_nothing_are_not_counted():
    engine = tiny.engine()
    prompts = tiny.prompts(2, 10, 10, seed=8)
    tokens = [tiny.alone(tiny.native("llama"), p, 12) for p in prompts]
    stop = next(t for t in tokens[0] if t not in tokens[1])
    greedy = SamplingParams(temperature=0, max_tokens=12)
    engine.add_request("a", prompts[0], replace(greedy, stop_token_ids=[stop]))
    engine.add_request("b", prompts[1], greedy)
    done = tiny.run(engine)
    a, b = (done[name].outputs[0].token_ids for name in "ab")
    assert (a[-1], b) == (stop, tokens[1])
    assert engine.metrics()["decode_tokens"] == len(a) + len(b) - 2


def test_blocks_that_are_filled_ahead_are_found_by_others():
    engine = tiny.engine()
    prompt, greedy = tiny.prompts(1, 20, 20)[0], tiny.greedy(30)
    answer = tiny.ask(engine, prompt, greedy).outputs[0].token_ids
    # 49 tokens are in the store, and six full blocks of 8 can be found.
    assert tiny.ask(engine, prompt + answer, greedy).num_cached_tokens == 48


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("length", [3, 90])
def test_a_step_is_submitted_when_the_one_before_is_done_unless_they_may_overlap(
    monkeypatch, overlaps, length
):
    """Some steps decode.  Others are one chunk, and sample nothing."""
    engine = tiny.engine(attention="reference", max_num_batched_tokens=10)
    engine.runner.attention.overlaps = overlaps
    prompt = tiny.prompts(1, length, length)[0]
    engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=30))
    for _ in range(3):
        engine.step()
    order, wait, submit = [], StepResult.wait, mx.async_eval
    monkeypatch.setattr(StepResult, "wait", lambda self: (order.append("wait"), wait(self)))
    monkeypatch.setattr(mx, "async_eval", lambda *a: (order.append("submit"), submit(*a)))
    engine.step()
    expected = ["submit", "wait"] if overlaps else ["wait", "submit", "wait"]
    assert order[: len(expected)] == expected


@pytest.mark.parametrize(("length", "budget"), [(20, 64), (90, 8)])
def test_a_step_ahead_copies_no_store(length, budget):
    """48 MiB of K and V: writes of a step that is built ahead, decodes or nothing but a chunk, are
    in place too."""
    engine = tiny.engine(
        num_blocks=8192,
        attention="reference",
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    layer = engine.runner.attention.store.keys[0].nbytes
    tiny.submit(engine, tiny.prompts(3, length, length), tiny.greedy(30))
    for _ in range(3):
        engine.step()
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(10):
        engine.step()
    assert engine.metrics()["steps_ahead"] > 10
    assert mx.get_peak_memory() - before < layer // 8


def test_a_process_may_end_while_a_step_is_under_way(tmp_path):
    folder = tiny.write_folder(tmp_path / "tiny")
    script = f"""
from vllm_metal_lite import LLM, SamplingParams
llm = LLM({str(folder)!r})
llm.engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
for _ in range(5):
    llm.engine.step()
assert llm.engine.in_flight.pipeline.steps
"""
    ended = run_python("-c", script)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_id_may_be_used_again_while_its_last_step_is_under_way():
    engine = tiny.engine()
    prompts = tiny.prompts(2, 20, 20, seed=6)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    engine.add_request("a", prompts[0], greedy)
    for _ in range(4):
        engine.step()
    assert engine.in_flight.pipeline.steps
    engine.abort("a")
    engine.add_request("a", prompts[1], greedy)
    expected = tiny.alone(tiny.native("llama"), prompts[1], 12)
    assert tiny.run(engine)["a"].outputs[0].token_ids == expected


def test_what_an_aborted_prompt_scores_in_the_step_ahead_is_nobodys():
    engine = tiny.engine(max_num_batched_tokens=32, long_prefill_token_threshold=16)
    prompts = tiny.prompts(2, 60, 60, seed=6)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0)
    engine.add_request("a", prompts[0], params)
    engine.add_request("b", prompts[1], params)
    engine.step()
    assert len(engine.in_flight.outputs[0].segments) == 2
    engine.abort("a")
    engine.add_request("a", prompts[1], params)
    done = tiny.run(engine)
    expected = tiny.alone(tiny.native("llama"), prompts[1], 3)
    for name in "ab":
        assert [next(iter(p)) for p in done[name].prompt_logprobs[1:]] == prompts[1][1:]
        assert done[name].outputs[0].token_ids == expected
