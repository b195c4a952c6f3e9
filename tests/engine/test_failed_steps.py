"""A request that spoils its steps ends alone, and all others get the tokens of a run without it."""

from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine.faults import PLACES, Fault, decodes_from, serve, spoil
from tests.support.engine.guesses import Guesses
from tests.support.engine.slots import SlotConstraint
from tests.support.engine.slots import alone as tokens_alone
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.engine.failed_steps import MAX_FAILURES
from vllm_metal_lite.engine.llm import LLM
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.sampling_params import SamplingParams

PROMPTS = tiny.prompts(12, 3, 30, seed=31)
LENGTH = 8


def engine_of(name: str = "llama", **options):
    return tiny.engine(name, **{"max_num_seqs": 12, "num_blocks": 100, **options})


def check(engine, bad, prompts=PROMPTS, name="llama", n=LENGTH, may_pass=False) -> None:
    """Run all prompts.  Those of `bad` must fail, and all others must not notice.

    may_pass: a prompt that is computed again after a failure may give a bad request's last token.
    """
    tiny.submit(engine, prompts, n)
    done, errors = serve(engine)
    assert set(errors) <= set(bad)
    assert may_pass or set(errors) == set(bad)
    assert set(errors.values()) <= {"the forward failed"}
    alone = tiny.all_alone(name, prompts, n)
    assert {i: o.outputs[0].token_ids for i, o in done.items()} == {
        str(i): tokens for i, tokens in enumerate(alone) if str(i) not in errors
    }
    assert engine.metrics()["blocks_owned"] == 0
    assert not engine.scheduler.suspects
    assert not engine.failed_steps.is_hopeless


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("nth", [0, 1, 4])
@pytest.mark.parametrize(("position", "count"), [(0, 12), (3, 6), (5, 6), (11, 12)])
def test_one_request_ends_alone(position, count, nth, place):
    """nth: the decode that fails; 0: the prompt fails.  Runs with and without steps ahead."""
    bad = {str(position): (decodes_from(nth), place)}
    for ahead in (False, True):
        engine = tiny.run_ahead(engine_of(), ahead)
        spoil(engine, bad)
        check(engine, bad, PROMPTS[:count])


@st.composite
def faults(draw):
    names = draw(st.sets(st.integers(0, 11), max_size=12))
    nth, place = st.integers(0, LENGTH - 1), st.sampled_from(PLACES)
    return {str(i): (decodes_from(draw(nth)), draw(place)) for i in sorted(names)}


@given(
    faults(),
    st.sampled_from([2, 4, 12]),
    st.sampled_from([16, 64]),
    st.sampled_from(["mixed", "whole"]),
    st.sampled_from([16, 100]),
)
@settings(max_examples=25)
def test_no_request_ends_for_another(bad, seats, budget, policy, num_blocks):
    engine = engine_of(
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        prefill_policy=policy,
        num_blocks=num_blocks,
    )
    spoil(engine, bad)
    check(engine, bad, may_pass=True)


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text", "rwkv7"])
@pytest.mark.parametrize("nth", [0, 3])
def test_other_kinds_of_layers(name, nth):
    engine = engine_of(name)
    spoil(engine, bad := {"2": (decodes_from(nth), "wait")})
    check(engine, bad, PROMPTS[:6], name)


@pytest.mark.parametrize("place", ["launch", "wait"])
def test_with_drafts(place):
    engine = engine_of(speculate="auto")
    truth = {str(i): tokens for i, tokens in enumerate(tiny.all_alone("llama", PROMPTS, 30))}
    engine.in_flight.speculator = Guesses(engine, truth)
    spoil(engine, bad := {"3": (decodes_from(5), place)})
    check(engine, bad, PROMPTS[:6], n=30)


def test_with_drafts_that_cannot_be_made():
    """Such as those of a grammar that fails at a draft."""
    engine = engine_of(speculate="auto")
    alone = tiny.all_alone("llama", PROMPTS[:6], 30)
    truth = {str(i): tokens for i, tokens in enumerate(alone)}
    engine.in_flight.speculator = Guesses(engine, truth)
    continued = engine.in_flight.constraints.continued

    def failing(request, *args):
        if request.request_id == "3" and request.num_tokens > request.num_prompt_tokens + 5:
            raise ZeroDivisionError("a bad draft")
        return continued(request, *args)

    engine.in_flight.constraints.continued = failing
    tiny.submit(engine, PROMPTS[:6], 30)
    done, errors = serve(engine)
    assert errors == {"3": "a bad draft"}
    found = {i: o.outputs[0].token_ids for i, o in done.items()}
    assert found == {i: tokens for i, tokens in truth.items() if i != "3"}


@pytest.mark.parametrize("seats", [4, 16])
def test_a_crowd_of_bad_requests_costs_no_good_one(seats):
    """More steps fail in a row than when a device is lost."""
    good, engine = (14, 15, 20), engine_of(max_num_seqs=seats)
    prompts = tiny.prompts(24, 3, 20, seed=5)
    bad = {str(i): (decodes_from(0), "launch") for i in range(24) if i not in good}
    spoil(engine, bad)
    check(engine, bad, prompts)


def test_a_scheduler_that_fails_ends_all_requests():
    """No request is to blame, and no step of another request can show that steps work."""
    engine = engine_of()
    for name in "ab":
        engine.add_request(name, [1, 2, 3], tiny.greedy(4))
    engine.scheduler.schedule = Mock(side_effect=ZeroDivisionError("broken"))
    done, errors = serve(engine, 2 * MAX_FAILURES)
    assert not done
    assert errors == {"a": "broken", "b": "broken"}


def test_a_lost_device_ends_all_requests():
    engine = engine_of(max_num_seqs=4)
    tiny.submit(engine, PROMPTS, LENGTH)
    for _ in range(3):
        engine.step()
    execute, numbers = engine.runner.execute, iter(range(1, 100))
    engine.runner.execute = Mock(side_effect=(Fault(f"lost {i}") for i in numbers))
    done, errors = serve(engine)
    assert not done
    assert len(errors) == len(PROMPTS)
    assert set(errors.values()) <= {f"lost {i}" for i in range(1, MAX_FAILURES + 1)}
    assert engine.failed_steps.is_hopeless
    engine.runner.execute = execute
    check(engine, {})


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("place", ["launch", "before it"])
def test_a_failure_that_does_not_repeat_ends_nobody(count, place):
    engine = engine_of()
    part, name = (
        (engine.runner, "execute") if place == "launch" else (engine.in_flight.inputs, "add")
    )
    work, numbers = getattr(part, name), iter(range(1000))

    def fail_at_times(*args):
        if next(numbers) % 60 == 3:
            raise Fault("the forward failed")
        return work(*args)

    setattr(part, name, fail_at_times)
    check(engine, {}, PROMPTS[:count], n=40)


def test_requests_that_fail_only_together_all_finish():
    """For example, they need too much memory together.  They do not start again and again."""
    engine, failures = engine_of(), []
    execute = engine.runner.execute

    def fail_together(batch, *args):
        if batch.num_segments > 1:
            failures.append(1)
            raise Fault("[metal::malloc] too much")
        return execute(batch, *args)

    engine.runner.execute = fail_together
    check(engine, {}, PROMPTS[:3], n=40)
    assert len(failures) <= 6


def test_all_answers_of_a_request_end_with_it():
    engine = engine_of()
    engine.add_request("bad", PROMPTS[0], tiny.greedy(LENGTH, n=3))
    engine.add_request("good", PROMPTS[1], tiny.greedy(LENGTH, n=2))
    spoil(engine, {"bad": (decodes_from(2), "launch")})
    done, errors = serve(engine)
    assert list(errors) == ["bad"]
    tokens = [o.token_ids for o in done["good"].outputs]
    assert tokens == tiny.all_alone("llama", [PROMPTS[1]], LENGTH) * 2


@pytest.mark.parametrize("method", ["fill", "accept", "forced"])
def test_a_grammar_that_fails_ends_its_request(method):
    slots = [[t, t + 1] if t % 3 else [t] for t in range(10, 40)]
    for ahead in (False, True):
        engine = tiny.run_ahead(engine_of(), ahead)
        constraints = {name: SlotConstraint(slots, tiny.VOCAB) for name in "abc"}
        for i, (name, constraint) in enumerate(constraints.items()):
            engine.add_request(name, PROMPTS[i], tiny.greedy(20))
            engine.in_flight.constraints.add(
                engine._answers[name].request, constraint, engine._answers[name].params
            )
        work = getattr(constraints["b"], method)

        def fail(*args, work=work, seen=constraints["b"].seen):
            if len(seen) > 4:
                raise Fault("no grammar")
            return work(*args)

        setattr(constraints["b"], method, fail)
        done, errors = serve(engine)
        assert errors == {"b": "no grammar"}
        model = tiny.native("llama")
        for i, name in ((0, "a"), (2, "c")):
            wanted = tokens_alone(model, PROMPTS[i], slots, 20)
            assert done[name].outputs[0].token_ids == wanted


def test_prompt_logprobs_and_embeddings_beside_a_bad_request():
    found = []
    for bad in ({}, {"bad": (decodes_from(1), "wait")}):
        engine = engine_of(max_num_batched_tokens=16)
        spoil(engine, bad)
        engine.add_request("e", PROMPTS[0], PoolingParams(pooling="mean"))
        engine.add_request("bad", PROMPTS[1], tiny.greedy(4))
        scored = SamplingParams(temperature=0, max_tokens=6, logprobs=1, prompt_logprobs=1)
        engine.add_request("s", PROMPTS[2], scored)
        engine.add_request("e2", PROMPTS[3], PoolingParams(pooling="last"))
        done, errors = serve(engine)
        assert list(errors) == list(bad)
        found.append(done)
    plain, beside = found
    for name in ("e", "e2"):
        np.testing.assert_allclose(plain[name].pooled, beside[name].pooled, rtol=1e-4, atol=1e-5)
    a, b = (done["s"] for done in found)
    assert a.outputs[0].token_ids == b.outputs[0].token_ids
    for one, other in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
        assert {t: pytest.approx(v.logprob, abs=1e-3) for t, v in one.items()} == {
            t: v.logprob for t, v in other.items()
        }


def test_an_answer_that_cannot_be_recorded_ends_alone():
    engine = engine_of()
    tiny.submit(engine, PROMPTS[:6], tiny.greedy(LENGTH, ignore_eos=True))
    engine._answers["2"]._extend = Mock(side_effect=[False, False, ValueError("no text")])
    done, errors = serve(engine)
    assert not errors
    bad = done.pop("2").outputs[0]
    assert (bad.finish_reason, bad.error) == ("error", "the answer cannot be recorded: no text")
    alone = tiny.all_alone("llama", PROMPTS[:6], LENGTH)
    assert {i: o.outputs[0].token_ids for i, o in done.items()} == {
        str(i): tokens for i, tokens in enumerate(alone) if i != 2
    }
    assert engine.metrics()["blocks_owned"] == 0


def test_ctrl_c_among_suspects_loses_nothing():
    engine = engine_of()
    spoil(engine, bad := {"1": (decodes_from(2), "wait")})
    execute, numbers = engine.runner.execute, iter(range(1000))

    def press(*args):
        if engine.scheduler.suspects and next(numbers) in (1, 4):
            raise KeyboardInterrupt
        return execute(*args)

    engine.runner.execute = press
    tiny.submit(engine, PROMPTS[:4], LENGTH)
    pressed, done, errors = 0, {}, {}
    while engine.has_unfinished_requests():
        try:
            more, failed = serve(engine)
        except KeyboardInterrupt:
            pressed += 1
        else:
            done, errors = done | more, errors | failed
    assert pressed == 2
    assert list(errors) == list(bad)
    assert len(done) == 3


def test_the_log_names_the_request(caplog):
    engine = engine_of()
    spoil(engine, bad := {"3": (decodes_from(2), "launch")})
    check(engine, bad, PROMPTS[:6])
    assert caplog.messages == [
        "a step of the engine failed: the forward failed",
        "a step of the engine failed and ends 3: the forward failed",
    ]


@pytest.mark.parametrize("place", PLACES)
def test_llm(tmp_path_factory, place):
    folder = tmp_path_factory.mktemp("model")
    llm = LLM(str(tiny.write_folder(folder)), num_blocks=64, block_size=8)
    prompts, params = PROMPTS[:6], tiny.greedy(LENGTH, ignore_eos=True)
    plain = tiny.tokens_of(llm.generate(prompts, params))
    first = next(llm._ids) + 1
    spoil(llm.engine, {str(first + 2): (decodes_from(3), place)})
    outputs = llm.generate(prompts, params)
    bad = outputs.pop(2).outputs[0]
    assert bad.finish_reason == "error"
    assert bad.error == "a step of the engine failed: the forward failed"
    assert bad.token_ids == plain.pop(2)[: len(bad.token_ids)]
    assert tiny.tokens_of(outputs) == plain
    llm.engine.runner.execute = Mock(side_effect=Fault("the device is lost"))
    with pytest.raises(Fault, match="the device is lost"):
        llm.generate(PROMPTS[:6], params)
    assert not llm.engine.has_unfinished_requests()
