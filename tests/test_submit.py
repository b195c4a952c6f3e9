"""Steps that a thread submits: the same tokens and errors, and nobody waits for a launch."""

import asyncio
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import tiny_models as tiny
from array_attention import compile_on_cpu

from vllm_metal_lite import runner, submit
from vllm_metal_lite.backend import mx
from vllm_metal_lite.engine.async_engine import AsyncEngine
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.sampling_params import SamplingParams

STEM = tiny.prompts(1, 20, 20, seed=3)[0]
PROMPTS = [*tiny.prompts(5, 3, 40, seed=17), [*STEM, 5, 6], [*STEM, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
# All that the sampler keeps on the device.
PENALISED = SamplingParams(
    seed=5, max_tokens=24, top_k=20, frequency_penalty=0.3, logprobs=2, prompt_logprobs=1
)


@pytest.fixture(autouse=True)
def by_thread(monkeypatch):
    monkeypatch.setenv(submit.VARIABLE, "on")


def make_engine(name="llama", overlaps=True, compiles=False, **options):
    engine = tiny.engine(name, **options)
    if compiles:
        engine = compile_on_cpu(engine)
    # On a CPU writes by MLX's operations are merely copies then.
    engine.runner.attention.overlaps = overlaps
    return engine


def by_hand(engine):
    """The same engine, submitting in its own thread."""
    engine.runner.submitter = submit.Submitter()
    engine.sampler.building = engine.runner.submitter.building
    return engine


def answers(engine, params=GREEDY, prompts=PROMPTS):
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    return ended(tiny.run(engine), len(prompts))


def ended(done, count):
    outputs = [done[str(i)].outputs[0] for i in range(count)]
    return [(o.token_ids, o.logprobs and [sorted(p) for p in o.logprobs]) for o in outputs]


@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize(
    ("name", "overlaps", "compiles"),
    [("llama", True, False), ("qwen3", True, True), ("qwen3_next", True, False),
     ("llama/window", False, False)],
)  # fmt: skip
def test_tokens_are_the_same(monkeypatch, name, overlaps, compiles, params):
    """Chunks beside decodes, shared prefixes, preemptions; steps compiled and not."""
    monkeypatch.setattr(runner, "bucket", lambda n: 1 << (n - 1).bit_length())
    options = {"num_blocks": 16, "max_num_batched_tokens": 24, "max_model_len": 100}
    expected = answers(by_hand(make_engine(name, overlaps, compiles, **options)), params)
    engine = make_engine(name, overlaps, compiles, **options)
    assert engine.runner.submitter.threaded
    assert answers(engine, params) == expected
    metrics = engine.metrics()
    assert metrics["preemptions"] > 0
    assert metrics["compiled_steps"] > metrics["steps"] // 2 or not compiles


def no_such_stream() -> mx.array:
    """What no thread can evaluate any more: MLX's error comes from `async_eval`."""
    made = []
    thread = threading.Thread(target=lambda: made.append(mx.ones(1) + 1))
    thread.start()
    thread.join()
    return made[0]


def results_of(monkeypatch, engine):
    """What its runner gives from now on."""
    execute, results = engine.runner.execute, []
    monkeypatch.setattr(
        engine.runner, "execute", lambda *a: results.append(execute(*a)) or results[-1]
    )
    return results


def fail_in(monkeypatch, engine, steps):
    """Some forwards give logits that cannot be evaluated; returns how many there were."""
    forward, calls = engine.runner._forward, []

    def fails(step):
        calls.append(step)
        logits = forward(step)
        return logits + no_such_stream() if len(calls) in steps else logits

    monkeypatch.setattr(engine.runner, "_forward", fails)
    return calls


@pytest.mark.parametrize("ahead", [True, False])
def test_a_submission_that_fails_is_told_once_and_loses_nothing(monkeypatch, ahead):
    expected = answers(by_hand(make_engine()))
    engine = make_engine()
    engine.async_scheduling = ahead
    fail_in(monkeypatch, engine, (1, 4, 5, 12, 13, 14, 30))
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, GREEDY)
    done, failures = {}, 0
    while engine.has_unfinished_requests():
        try:
            done |= {o.request_id: o for o in engine.step() if o.finished}
        except RuntimeError:
            failures += 1
            assert failures < 10
        engine.scheduler.kv.check()
    assert 4 <= failures <= 7  # of two that were taken back together, one is told
    assert ended(done, len(PROMPTS)) == expected


def test_an_error_that_nobody_waits_for_is_told_at_the_next_submission(monkeypatch):
    engine = make_engine()
    fail_in(monkeypatch, engine, (2,))
    engine.add_request("a", PROMPTS[0], GREEDY)
    engine.step()  # the second step is under way
    engine.abort("a")
    engine.add_request("b", PROMPTS[1], GREEDY)
    with pytest.raises(RuntimeError, match="no Stream"):
        engine.step()
    tokens = tiny.run(engine)["b"].outputs[0].token_ids
    assert tokens == tiny.alone(tiny.native("llama"), PROMPTS[1], 24)


def test_results_are_read_late_never_or_by_another_thread(monkeypatch):
    expected = answers(make_engine())
    engine = make_engine()
    results = results_of(monkeypatch, engine)
    # The host's copies: the engine itself waits, and reads what another thread has read.
    finish, read = engine._finish, []

    def finish_elsewhere(step):
        thread = threading.Thread(target=lambda: read.append(step.result.token_ids.tolist()))
        thread.start()
        thread.join()
        return finish(step)

    monkeypatch.setattr(engine, "_finish", finish_elsewhere)
    assert answers(engine) == expected
    assert [r.token_ids.tolist() for r in results] == read
    late = make_engine()
    late.add_request("a", PROMPTS[0], GREEDY)
    late.step()
    first = late._steps[0].result
    for _ in range(5):
        late.step()
    assert first.token_ids.shape == (1,)
    late.abort("a")  # a step is under way that nobody reads
    late._steps.clear()
    late.add_request("b", PROMPTS[1], GREEDY)
    tokens = tiny.run(late)["b"].outputs[0].token_ids
    assert tokens == tiny.alone(tiny.native("llama"), PROMPTS[1], 24)


def long_work(count=80, size=300) -> mx.array:
    """Takes about a tenth of a second to submit: on a CPU MLX lets few operations wait in line."""
    x = mx.full((size, size), 1 / size)
    y = x
    for _ in range(count):
        y = y @ x
    return y


def test_submissions_run_in_their_order_and_python_goes_on_meanwhile():
    thread, before = submit.choose(True), sys.getswitchinterval()
    ended = []
    sys.setswitchinterval(30)  # nobody gets Python's lock by asking for it
    try:
        with thread.building():
            work = [long_work() for _ in range(3)]
        submissions = []
        for arrays in work:
            submissions.append(thread.submit(arrays))
            ended.append([s.ended.is_set() for s in submissions])
        for s in submissions:
            s.wait()
    finally:
        sys.setswitchinterval(before)
    assert ended == [[False], [True, False], [True, True, False]]  # each waits for the one before
    assert [float(w[0, 0]) for w in work] == pytest.approx([1 / 300] * 3, rel=1e-3)


def test_one_evaluates_while_the_thread_is_idle():
    thread = submit.choose(True)
    with thread.building():
        submission, other = thread.submit(long_work()), long_work(3)
        with thread.idle():
            assert submission.ended.is_set()
            mx.eval(other)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_model_s_own_code_waits_for_the_thread(monkeypatch, compiles):
    """For it may evaluate something; what is compiled runs none of it."""
    engine, waits = make_engine(compiles=compiles), []
    idle = engine.runner.submitter.idle
    monkeypatch.setattr(engine.runner.submitter, "idle", lambda: waits.append(1) or idle())
    answers(engine, prompts=PROMPTS[:1])
    metrics = engine.metrics()
    traced = len(engine.runner.compiled._variants)
    assert len(waits) == metrics["steps"] - metrics["compiled_steps"] + traced
    assert (metrics["compiled_steps"] > traced) == compiles


def test_what_the_host_reads_is_not_what_the_next_step_is_built_on(monkeypatch):
    """On CUDA reading an array moves it."""
    engine = make_engine()
    results = results_of(monkeypatch, engine)
    answers(engine, prompts=PROMPTS[:1])

    def address(array):
        return np.asarray(array).__array_interface__["data"][0]

    sampled = [r for r in results if r.arrays and r._sampled is not None]
    assert len(sampled) >= GREEDY.max_tokens
    for result in sampled:
        assert address(result.arrays[0]) != address(result._sampled)
        assert mx.array_equal(result.arrays[0], result._sampled)


def test_what_a_step_made_is_held_until_its_submission_has_ended():
    class Made:
        dropped = False

        def __del__(self):
            Made.dropped = True

    thread = submit.choose(True)
    with thread.building():
        submission = thread.submit(long_work(), Made())
    assert not Made.dropped
    submission.wait()
    thread.submit([]).wait()
    assert Made.dropped


def test_a_server_s_engine():
    """The sampler's arrays are made outside of steps, and its thread ends before the process."""
    params = SamplingParams(temperature=0, max_tokens=12, frequency_penalty=0.5)

    async def last(stream):
        return [output async for output in stream][-1].outputs[0].token_ids

    async def serve(engine):
        return await asyncio.gather(*[last(engine.generate(p, params)) for p in PROMPTS])

    engine = AsyncEngine(make_engine())
    try:
        tokens = asyncio.run(asyncio.wait_for(serve(engine), 600))
    finally:
        engine.shutdown()
    assert tokens == [t for t, _ in answers(by_hand(make_engine()), params)]


ENDS = """
import sys
sys.path.insert(0, {tests!r})
import tiny_models as tiny
from vllm_metal_lite.engine.async_engine import AsyncEngine
from vllm_metal_lite.sampling_params import SamplingParams
engine = tiny.engine()
engine.runner.attention.overlaps = True
for i, prompt in enumerate(tiny.prompts(4, 3, 40)):
    engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=50))
for _ in range(4):
    engine.step()
assert engine.runner.submitter.threaded and engine._steps
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "AsyncEngine(engine)"])
def test_the_process_ends_with_a_step_under_way(end):
    code = ENDS.format(tests=os.path.dirname(__file__), end=end)
    how = {"capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run([sys.executable, "-X", "dev", "-c", code], **how)
    assert (done.returncode, done.stderr) == (3 if "3" in end else 0, "")


def test_the_variable(monkeypatch):
    monkeypatch.setenv(submit.VARIABLE, "off")
    assert not submit.choose(True).threaded
    monkeypatch.delenv(submit.VARIABLE)
    assert not submit.choose(True).threaded  # on a CPU
    monkeypatch.setattr(submit.backend, "name", lambda: "cuda")
    assert submit.choose(True) is submit.choose(True)
    assert submit.choose(True).threaded
    assert not submit.choose(False).threaded
    monkeypatch.setattr(submit.backend, "name", lambda: "metal")
    assert not submit.choose(True).threaded
    monkeypatch.setenv(submit.VARIABLE, "on")
    assert submit.choose(False).threaded
    monkeypatch.delattr(mx, "new_thread_unsafe_stream")
    assert not submit.choose(True).threaded
    monkeypatch.setenv(submit.VARIABLE, "1")
    with pytest.raises(
        ConfigError, match="METAL_LITE_SUBMIT_THREAD must be 'on' or 'off', got '1'"
    ):
        submit.choose(True)
