"""One step ahead: whatever comes in between, nobody's tokens and no block's owner change."""

import subprocess
import sys
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import tiny_models as tiny
from fakes import FakeEngine, alone, fake_config

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch import ForwardBatch
from vllm_metal_lite.engine.async_scheduler import AsyncScheduler
from vllm_metal_lite.engine.request import Request, RequestStatus
from vllm_metal_lite.engine.scheduler import SchedulerOutput
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.kv.groups import KVGroup
from vllm_metal_lite.runner import StepResult
from vllm_metal_lite.sampling_params import SamplingParams

# The scheduler, with a fake model


def is_eos(token: int) -> bool:
    return token % 29 == 0


class AsyncFakeEngine(FakeEngine):
    """As the real engine does: a step ahead is packed, and run, before the host takes note of the
    tokens of the step before; an answer ends for its length or at an EOS, which nobody foresees."""

    steps_ahead = 1

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.scheduler = AsyncScheduler(
            self.scheduler.config, self.scheduler.kv.groups, self.max_model_len
        )
        self.launched: list[tuple[SchedulerOutput, ForwardBatch, list[int]]] = []
        self.num_ahead = self.num_dropped = 0

    def step(self, fail: bool = False) -> None:
        if not self.launched:
            self._launch(self.schedule())
        out, batch, tokens = self.launched[0]
        ahead = self.scheduler.schedule_ahead(out)
        if ahead is not None:
            assert not self.scheduler._partials
            self._prepare(ahead)
            self._launch(ahead, dict(zip(batch.req_indices.tolist(), tokens, strict=True)))
            self.num_ahead += 1
        if fail:
            while self.launched:
                output = self.launched.pop()[0]
                for segment in output.segments:
                    self._unseat(segment.request)
                self.scheduler.rollback(output)
            return
        self.launched.pop(0)
        self._finish(out, batch, tokens)
        if ahead is not None:
            self.scheduler.publish_ahead(ahead)
        self._end_answers()

    def _prepare(self, out: SchedulerOutput) -> None:
        for segment in out.segments:
            self._append_blocks(segment)

    def _launch(self, out: SchedulerOutput, tokens: dict[int, int] | None = None) -> None:
        """Run a step.  tokens: of the step before, by seat, which the table does not have yet."""
        rows = np.array([s.request.req_index for s in out.segments])
        computed = np.array([s.num_computed for s in out.segments])
        scheduled = np.array([s.num_scheduled for s in out.segments])
        batch = self.inputs.pack(rows, computed, scheduled, 0 if tokens is None else 1)
        if tokens is not None:
            known = np.array([tokens[r] for r in rows.tolist()], np.int32)
            batch = replace(batch, token_ids=known)
        self.launched.append((out, batch, self.model(batch)))

    def _finish(self, out: SchedulerOutput, batch: ForwardBatch, tokens: list[int]) -> None:
        terminal = [out.segments[i].request for i in batch.sample_segments]
        on = np.array([r.status is RequestStatus.RUNNING for r in terminal], bool)
        self.num_dropped += int((~on).sum())
        seats = batch.req_indices[batch.sample_segments]
        self.inputs.append_tokens(seats[on], np.array(tokens, np.int32)[on])
        self.scheduler.update(out, tokens)

    def _end_answers(self) -> None:
        for request in list(self.unfinished.values()):
            answer = request.output_token_ids
            if answer and (is_eos(answer[-1]) or len(answer) == self.limit(request)):
                self.abort(request)

    def limit(self, request: Request) -> int:
        return min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)

    def expected(self, request: Request) -> list[int]:
        tokens = alone(tuple(request.prompt_token_ids), self.limit(request), self.windows)
        end = next((i for i, t in enumerate(tokens) if is_eos(t)), len(tokens) - 1)
        return tokens[: end + 1]


def play(seed: int) -> AsyncFakeEngine:
    """Random requests, aborts and failures, under pressure of blocks or not."""
    choose = Random(seed).choice
    config = fake_config(
        choose([1, 2, 4, 5]),
        max_num_seqs=choose([1, 2, 4, 8]),
        max_num_batched_tokens=choose([1, 3, 8, 21, 64]),
        prefill_policy=choose(["mixed", "alternate", "whole"]),
        enable_prefix_caching=choose([True, True, False]),
    )
    windows = choose([(None,), (None,), (None, 6), (None, 1), (9, 3)])
    size = config.block_size
    groups = []
    for window in windows:
        num_blocks = choose([40, 45, 60, 400]) // size
        if window is not None:  # as few as let anybody finish
            num_blocks = choose([KVGroup(window=window).most_blocks(40, 1, size), num_blocks])
        groups.append(KVGroup(window=window, num_blocks=num_blocks))
    engine = AsyncFakeEngine(config, groups, 40)
    stems = [[i * 50 + j for j in range(12)] for i in range(2)]
    aborted: set[str] = set()
    for now in range(400):
        if now < 40 and choose([True, False]):
            prompt = [*choose(stems)[: choose(range(13))], choose([200, 201])]
            try:
                engine.add(prompt, choose([1, 2, 5, 9, 17, 30]), priority=choose([0, 0, 1]))
            except RequestError:
                continue
        if engine.unfinished and choose([True] + [False] * 19):
            request = choose(list(engine.unfinished.values()))
            aborted.add(request.request_id)
            engine.abort(request)
        if engine.unfinished:
            engine.step(fail=choose([True] + [False] * 29))
            engine.check_blocks()
        elif now >= 40:
            break
    assert not engine.unfinished, "a request does not finish"
    for name, request in engine.requests.items():
        answer, expected = request.output_token_ids, engine.expected(request)
        assert answer == (expected[: len(answer)] if name in aborted else expected)
    engine.scheduler.kv.check([])
    return engine


def test_any_workload_gives_every_request_its_own_tokens():
    engines = [play(seed) for seed in range(200)]
    assert sum(e.num_ahead for e in engines) > 5000
    assert sum(e.num_dropped for e in engines) > 200
    assert sum(e.scheduler.num_preemptions for e in engines) > 50
    assert sum(e.scheduler.prefix_hit_tokens for e in engines) > 3000


def running(num_blocks: int = 100, waiting: int = 0, max_tokens: int = 4, **options) -> tuple:
    """Two requests that decode, and a step of theirs under way."""
    config = fake_config(**{"max_num_batched_tokens": 64, "max_num_seqs": 2, **options})
    engine = AsyncFakeEngine(config, num_blocks, 64)
    requests = [engine.add([i] * 3, max_tokens + i) for i in range(2)]
    FakeEngine.step(engine)
    for i in range(waiting):
        engine.add([9 + i], 4)
    return engine, requests, engine.schedule()


def test_a_pure_continuation_is_scheduled_ahead():
    engine, requests, out = running()
    ahead = engine.scheduler.schedule_ahead(out)
    assert [(s.request, s.num_computed, s.num_scheduled) for s in ahead.segments] == [
        (r, 4, 1) for r in requests
    ]
    assert [len(s.new_block_ids[0]) for s in ahead.segments] == [1, 1]  # blocks of 4: a second
    assert ahead.num_decodes == 2


def test_whose_last_token_is_under_way_is_left_out():
    engine, (first, second), out = running()
    for _ in range(2):
        engine.execute(out)
        out = engine.schedule()
    assert [s.request for s in engine.scheduler.schedule_ahead(out).segments] == [second]
    engine.execute(out)
    assert first.status is RequestStatus.FINISHED
    assert engine.scheduler.schedule_ahead(engine.schedule()) is None  # that one's too


def test_tokens_are_waited_for_when_somebody_may_join_or_must_give_way():
    engine, _, out = running(waiting=1)
    assert engine.scheduler.schedule_ahead(out) is not None  # no seat for it
    engine, _, out = running(waiting=1, max_num_seqs=3)  # it is admitted, and computes its prompt
    assert out.admitted
    assert engine.scheduler.schedule_ahead(out) is None
    engine, _, out = running(max_num_seqs=3)
    engine.add([9], 4)
    assert engine.scheduler.schedule_ahead(out) is None
    engine, _, out = running(num_blocks=5, max_tokens=9)
    while out.segments[0].num_computed < 7:
        engine.execute(out)
        out = engine.schedule()
    assert engine.scheduler.kv.pools[0].num_available == 1  # and two want one
    assert engine.scheduler.schedule_ahead(out) is None
    assert engine.scheduler.kv.pools[0].num_available == 1


def test_tokens_are_waited_for_when_a_decode_had_no_room_in_the_step():
    engine, (first, _), out = running()
    engine.execute(out)
    object.__setattr__(engine.scheduler.config, "max_num_batched_tokens", 1)
    out = engine.schedule()
    assert [s.request for s in out.segments] == [first]
    assert engine.scheduler.schedule_ahead(out) is None


# The engine


VARIANTS = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "seeds": {"seed": 3, "top_p": 0.9, "min_p": 0.01},
    "min_tokens": {"seed": 4, "min_tokens": 9, "logit_bias": {7: 2.0}},
    "logprobs": {"seed": 5, "logprobs": 2, "prompt_logprobs": 1, "presence_penalty": 0.5},
    "allowed": {"seed": 6, "allowed_token_ids": list(range(0, 90, 2))},
    "n": {"seed": 7, "n": 3},
}


@pytest.mark.parametrize("name", ["llama", "granitemoehybrid"])
@pytest.mark.parametrize("how", VARIANTS)
def test_an_engine_gives_the_same_tokens_with_and_without(name, how):
    """Ends that nobody foresees, arrivals, aborts, preemptions, hits in the prefix cache."""
    answers, metrics = [], []
    for ahead in (False, True):
        engine = tiny.engine(name, num_blocks=24, max_num_batched_tokens=48, max_num_seqs=5)
        engine.async_scheduling = ahead
        rng = np.random.default_rng(1)
        done = {}
        for i, prompt in enumerate(tiny.prompts(10, 3, 30, seed=2)):
            params = SamplingParams(
                max_tokens=int(rng.integers(9, 40)),
                stop_token_ids=rng.integers(0, 101, 6).tolist(),
                **VARIANTS[how],
            )
            engine.add_request(str(i), prompt, params)
            for _ in range(rng.integers(0, 9)):
                done |= {o.request_id: o for o in engine.step() if o.finished}
                engine.scheduler.kv.check()
            if i == 7:
                engine.abort(str(i))
        done |= tiny.run(engine)
        assert engine.metrics()["blocks_owned"] == 0
        outputs = [done[str(i)] for i in range(10) if i != 7]
        answers.append([(o.token_ids, o.finish_reason, o.stop_reason, len(o.logprobs or ()))
                        for r in outputs for o in r.outputs])  # fmt: skip
        metrics.append(engine.metrics())
    assert answers[0] == answers[1]
    assert {reason for _, reason, _, _ in answers[0]} == {"stop", "length"}
    assert metrics[0]["steps_ahead"] == 0
    assert metrics[1]["steps_ahead"] > 10
    assert metrics[0]["decode_tokens"] <= metrics[1]["decode_tokens"] + 200


def test_the_host_reads_a_steps_tokens_when_the_next_one_is_built(monkeypatch):
    engine = tiny.engine()
    order = []
    launch, finish = engine._launch, engine._finish
    monkeypatch.setattr(engine, "_launch", lambda *a: (order.append("launch"), launch(*a))[1])
    monkeypatch.setattr(engine, "_finish", lambda *a: (order.append("finish"), finish(*a))[1])
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    tiny.run(engine)
    # A prompt, then three decodes: the second and the third before the one before it is read.
    assert order == ["launch", "finish", *["launch"] * 2, "finish", "launch", "finish", "finish"]


def test_blocks_that_are_filled_ahead_are_found_by_others():
    engine = tiny.engine()
    greedy = SamplingParams(temperature=0, max_tokens=30)
    prompt = tiny.prompts(1, 20, 20)[0]
    engine.add_request("a", prompt, greedy)
    answer = tiny.run(engine)["a"].outputs[0].token_ids
    engine.add_request("b", prompt + answer, greedy)
    assert tiny.run(engine)["b"].num_cached_tokens == 48  # of 49 in the store, in blocks of 8


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_is_submitted_when_the_one_before_is_done_unless_they_may_overlap(
    monkeypatch, overlaps
):
    engine = tiny.engine(attention="reference")
    monkeypatch.setattr(engine.runner.attention, "overlaps", overlaps, raising=False)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=30))
    for _ in range(3):
        engine.step()
    order, wait, submit = [], StepResult.wait, mx.async_eval
    monkeypatch.setattr(StepResult, "wait", lambda self: (order.append("wait"), wait(self)))
    monkeypatch.setattr(mx, "async_eval", lambda *a: (order.append("submit"), submit(*a)))
    engine.step()
    assert order == (["submit", "wait"] if overlaps else ["wait", "submit", "wait"])


def test_a_step_ahead_copies_no_store():
    """48 MiB of K and V: writes of a step that is built ahead are in place too."""
    engine = tiny.engine(num_blocks=8192, attention="reference")
    layer = engine.runner.attention.store.keys[0].nbytes
    for i, prompt in enumerate(tiny.prompts(3, 20, 20)):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=30))
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
assert llm.engine._steps
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_id_may_be_used_again_while_its_last_step_is_under_way():
    engine = tiny.engine()
    prompts = tiny.prompts(2, 20, 20, seed=6)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    engine.add_request("a", prompts[0], greedy)
    for _ in range(4):
        engine.step()
    assert engine._steps
    engine.abort("a")
    engine.add_request("a", prompts[1], greedy)
    expected = tiny.alone(tiny.native("llama"), prompts[1], 12)
    assert tiny.run(engine)["a"].outputs[0].token_ids == expected
