"""One step ahead under vLLM's async scheduling: answers are those of steps waited for."""

from unittest.mock import Mock

import pytest

from tests.support.models import tiny_models as tiny
from tests.vllm_plugin import kit
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.runner.result import StepResult

PREFIX = tiny.prompts(1, 20, 20, seed=2)[0]
PROMPTS = [PREFIX + p for p in tiny.prompts(4, 1, 30, seed=3)] + tiny.prompts(5, 3, 40, seed=4)
# What the sampler or the reports depend on, beside what was sampled before.
PARAMS = [
    {},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.2, "seed": 2, "n": 3, "top_p": 0.9},
    {"logprobs": 2},
    {"prompt_logprobs": 1, "logprobs": 0},
    {"frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 0.8, "seed": 3, "presence_penalty": 1.0, "prompt_logprobs": 0},
    {"bad_words": ["a", "bc", "def"]},
    {"min_tokens": 6, "logit_bias": {tiny.EOS: 100.0}, "ignore_eos": False},
]
TINY_POOL = {"num_gpu_blocks_override": 30}
CHUNKS = {"max_num_batched_tokens": 8}
LOADS = {
    "plain": {"enable_prefix_caching": False},
    "preempted": {**TINY_POOL, "enable_prefix_caching": False},
    "chunks": {**CHUNKS, "enable_prefix_caching": False},
    "cached, chunks, preempted": {**TINY_POOL, **CHUNKS},
    "few seats": {"max_num_seqs": 3},
    "a short context": {"max_model_len": 64},
}


def num_ahead(llm):
    return kit.worker(llm).pipeline.num_ahead


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("load", LOADS)
def test_answers_are_those_of_steps_that_are_waited_for(monkeypatch, load, overlaps):
    """Twice the load, so that rows and blocks are given to others; some end in mid-flight."""
    monkeypatch.setattr(ReferenceAttention, "overlaps", overlaps)
    answers = []
    for is_async in (False, True):
        with kit.engine(**LOADS[load], async_scheduling=is_async) as llm:
            before = kit.num_preemptions(llm)
            for turn in range(2):
                for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
                    kit.add(llm, f"{turn}-{i}", prompt, **params)
                kit.add(llm, f"{turn}-aborted", PROMPTS[0], prompt_logprobs=0)
            done = kit.run(llm, steps=15)
            llm.llm_engine.abort_request(["0-aborted", "1-aborted"])
            kit.add(llm, "again", PROMPTS[1])
            done |= kit.run(llm)
            assert kit.num_preemptions(llm) - before >= 2 * ("preempted" in load)
            assert (num_ahead(llm) > 20) if is_async else (num_ahead(llm) == 0)
        done = {name: kit.answer(o)[0] for name, o in done.items() if "aborted" not in name}
        assert len(done) == 2 * len(PROMPTS) + 1
        answers.append(done)
    assert answers[0] == answers[1]


def test_every_step_of_a_load_but_the_first_is_ahead():
    """Nobody ends by surprise, so vLLM never waits for a token before it schedules."""
    with kit.engine(max_num_batched_tokens=16) as llm:
        pipeline, launched = kit.worker(llm).pipeline, []
        launch = pipeline.launch
        pipeline.launch = lambda *a: launched.append(1) or launch(*a)
        kit.generate(llm, PROMPTS[:4], max_tokens=12)
        assert num_ahead(llm) == len(launched) - 1
        assert len(pipeline.steps) == 1  # and the last one's tokens were read by vLLM
        assert pipeline.steps[0].result.done


def test_prompts_are_scored_again_when_what_is_under_way_is_thrown_away():
    """vLLM drops the outputs of steps in flight when it preempts all for a reset, and the requests
    are back in the very next step."""
    with kit.engine(max_num_batched_tokens=32) as llm:
        for steps in range(1, 6):
            for i, prompt in enumerate(PROMPTS[:3]):
                kit.add(llm, f"{steps}-{i}", prompt, prompt_logprobs=0, max_tokens=8)
            done = kit.run(llm, steps)
            assert kit.core(llm).scheduler.reset_prefix_cache(reset_running_requests=True)
            done |= kit.run(llm)
            for i, prompt in enumerate(PROMPTS[:3]):
                out = done[f"{steps}-{i}"]
                assert [next(iter(p)) for p in out.prompt_logprobs[1:]] == prompt[1:]
                assert list(out.outputs[0].token_ids) == kit.alone("llama", prompt, 8)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_failed_step_ends_the_engine_with_its_error(monkeypatch, is_async):
    """Where the step is submitted, or where it is waited for."""

    def serve(owner, name):
        with kit.engine(async_scheduling=is_async) as llm, monkeypatch.context() as m:
            kit.add(llm, "a", PROMPTS[0])
            kit.run(llm, 4)
            m.setattr(owner, name, Mock(side_effect=RuntimeError("device lost")))
            kit.run(llm)

    for owner, name in ((StepResult, "wait"), (ReferenceAttention, "prepare")):
        with pytest.raises(RuntimeError, match="device lost"):
            serve(owner, name)
