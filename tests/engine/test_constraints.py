"""Answers under constraints: tokens within them, however steps are packed, and equal to mlx-lm's.

The constraints are lists of allowed tokens by position, with runs of one token that the engine
packs into one segment.
"""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.engine.guesses import Guesses
from tests.support.engine.slots import SlotConstraint, draw_slots
from tests.support.engine.slots import alone as tokens_alone
from tests.support.models import tiny_models as tiny
from tests.support.models.tiny_models import greedy
from vllm_metal_lite.config import PREFILL_POLICIES
from vllm_metal_lite.engine import intake
from vllm_metal_lite.sampling_params import SamplingParams

VOCAB = tiny.VOCAB
NAMES = ("llama", "llama/window/w9", "qwen3_5", "deepseek_v3", "recurrent_gemma")


def constrained(engine, slots_of: dict[str, list]):
    """Have the engine constrain requests in the order of `slots_of`."""
    waiting = list(slots_of.values())
    made = []

    def constrain(params, model):
        made.append(SlotConstraint(waiting.pop(0), VOCAB))
        return made[-1]

    add_request = engine.add_request

    def add(*args, **options):
        with patch.object(intake, "constraint_of", constrain):
            add_request(*args, **options)

    engine.add_request = add
    return made


@pytest.mark.long
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(NAMES))
@example(seed=2499, name="llama")  # drafts behind the forced tokens at an answer's start
def test_tokens_are_those_of_mlx_lm_under_the_same_limits(seed, name):
    rng = np.random.default_rng(seed)
    engine = tiny.engine(
        name,
        num_blocks=int(rng.integers(12, 40)),
        max_num_seqs=int(rng.integers(1, 5)),
        max_num_batched_tokens=int(rng.choice([8, 64])),
        prefill_policy=str(rng.choice(PREFILL_POLICIES)),
        speculate="auto",
    )
    tiny.run_ahead(engine, bool(rng.integers(4)))
    prompts = tiny.prompts(5, 1, 30, seed=seed % 1000)
    slots = {
        f"r{i}": draw_slots(rng, int(rng.integers(1, 30)), VOCAB, rng.choice([0.2, 0.7, 1]))
        for i in range(5)
    }
    wanted = {name: int(rng.integers(1, 30)) for name in slots}
    constrained(engine, slots)
    limits = zip(slots, prompts, strict=True)
    alone = {r: tokens_alone(tiny.native(name), p, slots[r], wanted[r]) for r, p in limits}
    engine.in_flight.speculator = Guesses(engine, alone, seed) if rng.integers(2) else None
    build, failing = engine.runner.compiled.build, set(rng.integers(0, 60, 2).tolist())
    count = iter(range(10**6))

    def sometimes(step, state):
        if next(count) in failing:
            raise MemoryError("no memory for this step")
        return build(step, state)

    engine.runner.compiled.build = sometimes
    for request_id, prompt in zip(slots, prompts, strict=True):
        engine.add_request(request_id, prompt, greedy(wanted[request_id], ignore_eos=True))
    done = tiny.run(engine, MemoryError)
    assert {name: output.outputs[0].token_ids for name, output in done.items()} == alone
    assert not engine.in_flight.constraints._of


@pytest.mark.parametrize(("sampled", "steps"), [(False, 4), (True, 23)])
def test_a_run_of_forced_tokens_takes_two_steps_and_not_twenty(sampled, steps):
    slots = [[1, 2], *([t] for t in range(10, 30)), [3, 4], [5, 6]]
    engine = tiny.engine()
    constrained(engine, {"r": slots})
    params = greedy(len(slots), logprobs=0 if sampled else None)  # forced tokens would have none
    tokens = tiny.ask(engine, [7, 8, 9], params).outputs[0].token_ids
    assert tokens[1:21] == list(range(10, 30))
    assert engine.metrics()["steps"] == steps


@pytest.mark.parametrize("policy", PREFILL_POLICIES)
def test_forced_tokens_pause_no_decode_and_no_prompt(policy):
    slots = [[t] if t % 4 else [t, t + 1] for t in range(16, 64)]
    engine = tiny.engine(prefill_policy=policy, max_num_batched_tokens=16)
    constrained(engine, {"r": slots, "plain": [], "late": []})
    for name in ("r", "plain", "late"):
        engine.add_request(name, [7, 8, 9] * (10 if name == "late" else 1), greedy(48))
        engine.step()
    tiny.run(engine)
    metrics = engine.metrics()
    assert metrics["prefill_tokens"] == 36
    # Under "alternate" a step of decodes comes between the two chunks of the last prompt.
    assert metrics["steps"] <= 53 + (policy == "alternate")


def test_forced_tokens_at_the_start_are_counted_too():
    engine = tiny.engine()
    constrained(engine, {"r": [*([t] for t in range(10, 20)), [1, 2]]})
    tiny.ask(engine, [7, 8, 9], greedy(11))
    assert engine.metrics()["forced_tokens"] == 10


@pytest.mark.parametrize("length", [60, 70, 80])  # one fails beside forced tokens
def test_forced_tokens_are_not_at_fault_for_a_prompt_of_their_step(length):
    slots = [[t] if t % 4 else [t, t + 1] for t in range(10, 60)]
    engine = tiny.engine(max_num_batched_tokens=16)
    constrained(engine, {"r": slots, "bad": []})
    execute, last = engine.runner.execute, tiny.VOCAB - 1

    def poisoned(batch, *args):
        if last in batch.token_ids:
            raise RuntimeError("the forward failed")
        return execute(batch, *args)

    engine.runner.execute = poisoned
    engine.add_request("r", [7, 8, 9], greedy(len(slots)))
    engine.add_request("bad", [5] * length + [last], greedy(4))
    at_fault, done = [], {}
    while engine.has_unfinished_requests():
        try:
            done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        except RuntimeError:
            at_fault += engine.requests_at_fault
            engine.abort(engine.requests_at_fault)
    assert at_fault == ["bad"]
    assert done == {"r": tokens_alone(tiny.native("llama"), [7, 8, 9], slots, len(slots))}


@pytest.mark.parametrize(("drafted", "num_steps"), [("other", 4), ("r", 3)])
def test_forced_tokens_do_not_pause_in_steps_with_drafts(drafted, num_steps):
    """They become drafts, behind a draft of their own request or beside those of another one."""
    slots = [[1, 2], [3, 4], *([t] for t in range(10, 30)), [5, 6], [7, 8]]
    prompt, model = [7, 8, 9], tiny.native("llama")
    truth = {"r": tokens_alone(model, prompt, slots, 24), "other": tiny.alone(model, prompt, 40)}
    engine = tiny.engine(speculate="auto")
    constrained(engine, {"r": slots, "other": []})
    engine.in_flight.speculator = Guesses(engine, truth, right=1.0)
    engine.in_flight.speculator.propose = lambda wanted: [
        truth[drafted][r.num_tokens - 3 : r.num_tokens - 2] * (r.request_id == drafted)
        for r, _ in wanted
    ]
    engine.in_flight.speculator.wants = lambda decodes: True
    for request_id, tokens in truth.items():
        engine.add_request(request_id, prompt, greedy(len(tokens), ignore_eos=True))
    outputs = [engine.step() for _ in range(num_steps)][-1]
    done = {o.request_id: o.outputs[0].token_ids for o in outputs if o.finished}
    assert done == {"r": truth["r"]}


def test_forced_tokens_without_room_for_drafts_are_counted_once():
    """They are a chunk in a step that has another request's drafts."""
    choices = ([t, t + 1] for t in range(40, 60, 2))
    slots = [[1, 2], *([t] for t in range(10, 30)), *choices]
    params = SamplingParams(max_tokens=31, seed=3, frequency_penalty=1.0, ignore_eos=True)
    truth = {"other": tiny.alone(tiny.native("llama"), [7, 8, 9], 60)}

    def answer(drafts):
        engine = tiny.engine(speculate="auto" if drafts else "off")
        constrained(engine, {"r": slots, "other": []})
        if drafts:
            engine.in_flight.speculator = Guesses(engine, truth, right=1.0)
            engine.in_flight.speculator.wants = lambda decodes: True
            room = engine.scheduler.drafts._room
            engine.scheduler.drafts._room = lambda segment: (
                room(segment) if segment.request.request_id == "other" else 0
            )
        engine.add_request("r", [7, 8, 9], params)
        engine.add_request("other", [7, 8, 9], greedy(60, ignore_eos=True))
        return tiny.run(engine)["r"]

    assert answer(drafts=True) == answer(drafts=False)


def test_tokens_known_at_the_start_are_computed_with_the_prompt():
    engine = tiny.engine()
    constrained(engine, {"r": [[10], [11], [12], [1, 2]]})
    engine.add_request("r", [7, 8, 9], greedy(5))
    first = engine.step()[0].outputs[0].token_ids
    assert first[:3] == [10, 11, 12]
    assert len(first) == 4


def test_tokens_known_at_the_start_end_where_the_context_does():
    engine = tiny.engine(max_model_len=16)
    slots = [[10 + i] for i in range(40)]
    constrained(engine, {"r": slots, "s": slots})
    engine.add_request("r", list(range(8)), greedy(100))
    engine.add_request("s", list(range(15)), SamplingParams(temperature=0, max_tokens=None))
    done = tiny.run(engine)
    assert done["r"].outputs[0].token_ids == list(range(10, 18))
    assert done["s"].outputs[0].token_ids == [10]


def test_tokens_known_at_the_start_do_not_count_as_cached_prompt():
    engine = tiny.engine()
    slots = [[10 + i] for i in range(40)]
    constrained(engine, {"r": slots, "s": slots})
    engine.add_request("r", [7, 8, 9], greedy(40))
    tiny.run(engine)
    assert tiny.ask(engine, [7, 8, 9], greedy(40)).num_cached_tokens == 3
    metrics = engine.metrics()
    assert metrics["prefix_cache_hit_tokens"] == 3
    assert metrics["prefix_cache_queried_tokens"] == 6


@pytest.mark.parametrize(
    "limit", [{"logprobs": 1}, {"bad_words": []}, {"allowed_token_ids": list(range(VOCAB))}]
)
def test_forced_tokens_are_sampled_where_a_request_has_other_limits(limit):
    engine = tiny.engine()
    constrained(engine, {"r": [[10], [11], [12], [1, 2]]})
    answer = tiny.ask(engine, [7, 8, 9], greedy(4, **limit)).outputs[0]
    assert answer.token_ids[:3] == [10, 11, 12]
    assert engine.metrics()["steps"] == 4
    assert answer.logprobs is None or len(answer.logprobs) == 4


def test_answers_of_one_request_have_constraints_of_their_own():
    engine = tiny.engine()
    made = constrained(engine, {"a": [[1], [2, 3]], "b": [[4], [5]]})
    outputs = tiny.ask(engine, [7, 8], SamplingParams(n=2, max_tokens=3, seed=1)).outputs
    assert outputs[0].token_ids[0] == 1
    assert outputs[1].token_ids[:2] == [4, 5]
    assert [len(c.seen) for c in made] == [3, 3]


def test_penalties_count_forced_tokens_once():
    """A sampled answer with penalties is the same with and without packing."""
    slots = [[1, 2, 3], *([t] for t in (5, 6, 5, 6)), *([1, 2, 3, 5, 6] for _ in range(8))]
    params = SamplingParams(max_tokens=12, seed=3, frequency_penalty=1.5, repetition_penalty=1.2)
    answers = []
    for logprobs in (None, 0):  # a request with log-probabilities samples all its tokens
        engine = tiny.engine()
        constrained(engine, {"r": slots})
        asked = replace(params, logprobs=logprobs)
        answers.append(tiny.ask(engine, [5, 6, 7], asked).outputs[0].token_ids)
    assert answers[0] == answers[1]
