"""The engine over real tiny models: what a user's requests get, whatever else happens."""

import os
import signal
from unittest.mock import Mock

import numpy as np
import pytest

from tests.support.engine.poison import poison, poison_states
from tests.support.models import tiny_models as tiny
from tests.support.models.tiny_models import all_alone, greedy
from vllm_metal_lite import LLM
from vllm_metal_lite.attention.sdpa.reference import ReferenceStepAttention
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.sampling_params import SamplingParams

PROMPTS = tiny.prompts(7, 1, 60, seed=5)


@pytest.mark.parametrize("seed", [None, 11])
def test_sampled_tokens_survive_preemption_and_neighbours(seed):
    """The draw depends on the seed and on how many tokens came before, and on nothing else."""
    prompts = tiny.prompts(5, 5, 30, seed=8)
    how = {"frequency_penalty": 0.4, "repetition_penalty": 1.2}
    params = SamplingParams(
        temperature=0.9, top_p=0.95, seed=seed, max_tokens=30, presence_penalty=0.5, **how
    )
    big = tiny.answers(tiny.engine(num_blocks=200), prompts, params)
    small_engine = tiny.engine(num_blocks=11, max_model_len=80, max_num_batched_tokens=16)
    small = tiny.answers(small_engine, prompts, params)
    assert small_engine.metrics()["preemptions"] > 0
    assert small == big
    if seed is not None:
        alone = [tiny.answers(tiny.engine(), [p], params)[0] for p in prompts]
        assert alone == big
    assert len({tuple(t) for t in big}) == len(big)


def test_a_shared_prefix_is_computed_once_and_changes_nothing():
    stem = tiny.prompts(1, 40, 40, seed=9)[0]
    prompts = [stem + tail for tail in ([1], [2, 3], [4] * 9, [])]
    engine = tiny.engine(max_num_batched_tokens=200)
    assert tiny.answers(engine, prompts, greedy(10)) == all_alone("llama", prompts, 10)
    first = engine.metrics()
    # 40 tokens are 5 blocks; the last prompt must leave its last token to be computed.
    assert first["prefix_cache_hit_tokens"] == 40 + 40 + 32
    assert tiny.answers(engine, prompts, greedy(10)) == all_alone("llama", prompts, 10)
    again = engine.metrics()
    assert again["prefill_tokens"] - first["prefill_tokens"] < sum(map(len, prompts)) // 4
    engine.reset_prefix_cache()
    assert engine.metrics()["blocks_cached"] == 0
    assert tiny.answers(engine, prompts, greedy(10)) == all_alone("llama", prompts, 10)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3/w9"])
def test_only_prompts_of_one_salt_share_blocks_and_states(name):
    engine = tiny.engine(name)
    tokens = tiny.prompts(1, 40, 40, seed=9)[0]
    found = []
    for salt in (None, "a", "b", None, "a", "b"):
        output = tiny.ask(engine, {"prompt_token_ids": tokens, "cache_salt": salt}, greedy(2))
        assert output.outputs[0].token_ids == tiny.alone(tiny.native(name), tokens, 2)
        found.append(output.num_cached_tokens)
    assert found == [0, 0, 0, 32, 32, 32]


def test_prompts_of_different_salts_in_one_step_share_nothing():
    engine = tiny.engine("qwen3_next", max_num_batched_tokens=512)
    (tokens,) = tiny.prompts(1, 80, 80, seed=9)
    for salt in ("a", "b", "a"):
        number = len(engine.scheduler.waiting)
        engine.add_request(str(number), {"prompt_token_ids": tokens, "cache_salt": salt}, greedy(2))
    done = tiny.run(engine)
    assert [done[str(i)].num_cached_tokens for i in range(3)] == [0, 0, 72]


@pytest.mark.parametrize("salt", ["", 5, ["a"], "\ud800"])
def test_a_bad_salt_is_refused(salt):
    with pytest.raises(RequestError, match="cache_salt"):
        tiny.engine().add_request("x", {"prompt_token_ids": [1], "cache_salt": salt})


def test_n_answers_of_one_prompt():
    engine = tiny.engine()
    done = tiny.ask(engine, PROMPTS[1], SamplingParams(n=4, seed=3, max_tokens=8))
    assert [o.index for o in done.outputs] == [0, 1, 2, 3]
    answers = [o.token_ids for o in done.outputs]
    assert len({tuple(a) for a in answers}) == 4
    for index in range(4):  # each as if asked for alone, with a seed of its own
        engine.add_request("one", PROMPTS[1], SamplingParams(seed=3 + index, max_tokens=8))
        assert tiny.run(engine)["one"].outputs[0].token_ids == answers[index]


def test_the_names_of_answers_are_taken_too():
    engine = tiny.engine()
    engine.add_request("a", PROMPTS[0], greedy(4, n=2))
    engine.add_request("b#1", PROMPTS[1], greedy(4))
    for request_id, n in (("a#1", 1), ("b", 2), ("a", 1)):
        with pytest.raises(RequestError, match="already in use"):
            engine.add_request(request_id, PROMPTS[2], greedy(4, n=n))
    done = tiny.run(engine)
    for request_id, prompt in (("a", 0), ("b#1", 1)):
        tokens = [answer.token_ids for answer in done[request_id].outputs]
        assert tokens == [tiny.alone(tiny.native("llama"), PROMPTS[prompt], 4)] * len(tokens)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_fails_loses_nothing(error, when):
    """The next step starts afresh, whether the step fails before the model ran or after."""
    engine = tiny.engine(num_blocks=14, max_num_batched_tokens=24)
    prompts = tiny.prompts(5, 10, 30, seed=4)
    stem = prompts[0][:16]
    prompts += [[*stem, 7], [*stem, 8, 9]]
    params = SamplingParams(temperature=0, max_tokens=20, frequency_penalty=0.3, logprobs=1)
    plain = tiny.answers(tiny.engine(num_blocks=200), prompts, params)
    execute, calls = engine.runner.execute, []

    def fails_often(*args):
        calls.append(1)
        if len(calls) % 3:
            return execute(*args)
        if when == "after":
            execute(*args)
        raise error

    engine.runner.execute = fails_often
    tiny.submit(engine, prompts, params)
    done = tiny.run(engine, type(error))
    assert len(calls) // 3 > 5
    assert [done[str(i)].outputs[0].token_ids for i in range(len(prompts))] == plain
    assert all(len(done[str(i)].outputs[0].logprobs) == 20 for i in range(len(prompts)))


@pytest.mark.parametrize(("name", "layer"), [("llama", 0), ("llama", 2), ("qwen3_next", 1)])
def test_a_forward_that_breaks_off_between_layers_loses_nothing(monkeypatch, name, layer):
    """Some layers have their writes queued by then; blocks change hands before they happen."""
    engine = tiny.engine(name, num_blocks=14)
    layers = len(engine.model.kv_specs)
    attend, countdown = ReferenceStepAttention.attend, [4 * layers + layer + 1]

    def break_off(*args, **how):
        countdown[0] -= 1
        if countdown[0] == 0:
            raise MemoryError("no memory for this layer")
        return attend(*args, **how)

    monkeypatch.setattr(ReferenceStepAttention, "attend", break_off)
    tiny.submit(engine, PROMPTS[:4], greedy(12))
    with pytest.raises(MemoryError):
        tiny.run(engine)
    done = tiny.run(engine)
    assert tiny.tokens_of(done[i] for i in "0123") == all_alone(name, PROMPTS[:4], 12)


def test_abort_gives_everything_back_and_disturbs_nobody():
    engine = tiny.engine()
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, greedy(12, n=2 if i == 3 else 1))
    for _ in range(3):
        engine.step()
    ended = engine.abort(["1", "3", "nobody"])
    assert [o.request_id for o in ended] == ["1", "3"]
    assert all(o.finish_reason == "abort" for e in ended for o in e.outputs)
    assert engine.abort("1") == []
    done = tiny.run(engine)
    assert sorted(done) == ["0", "2", "4", "5", "6"]
    for i in map(int, done):
        assert done[str(i)].outputs[0].token_ids == all_alone("llama", [PROMPTS[i]], 12)[0]
    assert engine.metrics()["blocks_owned"] == engine.metrics()["requests_running"] == 0
    assert tiny.answers(engine, PROMPTS[:2], greedy(3)) == all_alone("llama", PROMPTS[:2], 3)


def lose_step_in_flight(engine) -> None:
    """Spoil the step in flight: its rows are not written, and waiting for it raises an error."""
    step = engine.in_flight.pipeline.steps[0].result
    store = engine.runner.attention.store
    keep = [np.ones(store.keys[0].shape[0], bool)]
    keep[0][step.batch.slot_mapping()] = False
    poison(store, keep)
    poison_states(store.states, set(range(store.states.num_slots)) - set(step.batch.final_slots))

    step.wait = Mock(side_effect=RuntimeError("the device is gone"))


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_step_that_fails_after_its_requests_were_aborted_leaves_nothing_to_find(name):
    engine = tiny.engine(name, max_num_batched_tokens=32)
    (prompt,) = tiny.prompts(1, 100, 100, seed=7)
    engine.add_request("a", prompt, greedy(6))
    engine.step()  # the second chunk is in flight
    lose_step_in_flight(engine)
    engine.abort("a")
    for num_cached in (32 if name == "llama" else 0, 96):
        output = tiny.ask(engine, prompt, greedy(6))
        assert output.outputs[0].token_ids == tiny.alone(tiny.native(name), prompt, 6)
        assert output.num_cached_tokens == num_cached


def test_what_a_step_computes_for_aborted_requests_is_found():
    engine = tiny.engine(max_num_batched_tokens=32)
    (prompt,) = tiny.prompts(1, 100, 100, seed=7)
    engine.add_request("a", prompt, greedy(6))
    engine.step()
    engine.abort("a")
    output = tiny.ask(engine, prompt, greedy(6))
    assert output.outputs[0].token_ids == tiny.alone(tiny.native("llama"), prompt, 6)
    assert output.num_cached_tokens == 64


def test_stepping_an_idle_engine_does_nothing():
    engine = tiny.engine()
    assert engine.step() == []
    assert engine.metrics()["steps"] == 0


def test_ctrl_c_in_the_work_behind_the_last_answer_is_not_lost(tmp_path):
    llm = LLM(str(tiny.write_folder(tmp_path)), num_blocks=32, block_size=8)
    llm.engine.rest = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPTS[0]], greedy(2))


def test_ctrl_c_ends_a_blocking_call_between_steps_and_the_engine_goes_on(tmp_path):
    llm = LLM(str(tiny.write_folder(tmp_path)), num_blocks=32, block_size=8)
    step, calls, finished = llm.engine.step, [], []

    def press_ctrl_c():
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        outputs = step()
        finished.append(len(calls))  # the step in flight runs to its end
        return outputs

    llm.engine.step = press_ctrl_c
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPTS[0], PROMPTS[1]], greedy(20, ignore_eos=True))
    assert finished == [1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.engine.has_unfinished_requests()
    assert llm.metrics()["blocks_owned"] == 0
    (output,) = llm.generate([PROMPTS[0]], greedy(12, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 12
