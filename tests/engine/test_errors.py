"""Errors for a user: one line that names the value and the limit; no other request is harmed."""

from unittest.mock import Mock

import numpy as np
import pytest

from tests.support.models import tiny_models as tiny
from vllm_metal_lite.errors import RequestError, SamplingError
from vllm_metal_lite.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)

BAD_REQUESTS = {
    "empty prompt": (([], GREEDY), {}, ["empty"]),
    "longer than the context": (([1] * 65, GREEDY), {}, ["65", "64"]),
    "as long as the context": (([1] * 64, GREEDY), {}, ["64"]),
    "negative token": (([1, -1], GREEDY), {}, ["-1", "101"]),
    "token beyond the vocabulary": (([1, 101], GREEDY), {}, ["101"]),
    "token beyond int32": (([2**40], GREEDY), {}, [str(2**40), "101"]),
    "token that is no integer": (([1, 2.0], GREEDY), {}, ["2.0"]),
    "token that is a bool": (([True], GREEDY), {}, ["True"]),
    "token that is a string": (([1, "a"], GREEDY), {}, ["'a'"]),
    "a prompt of two dimensions": ((np.ones((2, 2), int), GREEDY), {}, ["integers"]),
    "no prompt": ((None, GREEDY), {}, ["a prompt must be", "None"]),
    "a dict without a prompt": (({"text": "x"}, GREEDY), {}, ["a dict with 'prompt'", "'text'"]),
    "text without a tokenizer": (("hello", GREEDY), {}, ["tokenizer"]),
    "a stop string without a tokenizer": (
        ([1], SamplingParams(stop="e")), {}, ["stop", "tokenizer"]),
    "parameters of another type": (
        ([1], {"temperature": 0}), {}, ["SamplingParams", "{'temperature': 0}"]),
    "bias beyond the vocabulary": (
        ([1], SamplingParams(logit_bias={101: 1.0})), {}, ["logit_bias", "101"]),
    "stop token beyond the vocabulary": (
        ([1], SamplingParams(stop_token_ids=[500])), {}, ["stop_token_ids", "500"]),
    "priority that is no number": (([1], GREEDY), {"priority": "high"}, ["priority", "'high'"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_others_go_on(fault):
    engine = tiny.engine(max_model_len=64, max_num_batched_tokens=32)
    prompt = tiny.prompts(1, 20, 20)[0]
    engine.add_request("good", prompt, GREEDY)
    engine.step()
    (bad, params), how, words = BAD_REQUESTS[fault]
    before = tiny.counts(engine)
    with pytest.raises((RequestError, SamplingError)) as error:
        engine.add_request("bad", bad, params, **how)
    message = str(error.value)
    assert "\n" not in message
    assert all(w in message for w in words), message
    assert tiny.counts(engine) == before
    done = tiny.run(engine)
    assert list(done) == ["good"]
    assert done["good"].outputs[0].token_ids == tiny.alone(tiny.native("llama"), prompt, 8)
    other = tiny.engine(max_model_len=64, max_num_batched_tokens=32)
    other.add_request("good", prompt, GREEDY)
    answers = []
    for each in engine, other:  # the id is still free, and the default seed is the next one
        each.add_request("bad", prompt, SamplingParams(max_tokens=8))
        answers.append(tiny.run(each)["bad"].outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_request_ids_are_strings():
    engine = tiny.engine()
    for bad in (None, 3, ["a"]):
        with pytest.raises(RequestError, match="request_id"):
            engine.add_request(bad, [1], GREEDY)


def test_an_id_that_is_used_again_is_not_at_fault_for_the_step_of_an_aborted_prompt(caplog):
    engine = tiny.engine()
    prompts = tiny.prompts(2, 20, 20)
    engine.add_request("y", prompts[0], GREEDY)
    engine.step()
    engine.add_request("x", prompts[1], GREEDY)
    engine.step()
    (flying,) = engine.in_flight.outputs
    assert [s.request.request_id for s in flying.segments] == ["y", "x"]
    engine.abort("x")
    engine.add_request("x", prompts[1], GREEDY)

    engine.in_flight.pipeline.steps[0].result.wait = Mock(
        side_effect=RuntimeError("the forward failed")
    )
    with pytest.raises(RuntimeError, match="the forward failed"):
        engine.step()
    assert engine.requests_at_fault == []
    assert caplog.messages == ["a step of the engine failed: the forward failed"]
    done = tiny.run(engine)
    for name, prompt in zip("yx", prompts, strict=True):
        assert done[name].outputs[0].token_ids == tiny.alone(tiny.native("llama"), prompt, 8)
