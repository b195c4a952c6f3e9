"""Answers that have a form: complete ones are valid, also together with other limits."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate

from tests.support.chat.json_schemas import schemas
from tests.support.models import tiny_models as tiny
from vllm_metal_lite import LLM, MetalLiteError, SamplingParams, StructuredOutputsParams

PROMPT = "Tell me about a lantern in the rain."
YES_NO = {"choice": ["yes", "no"]}


@pytest.fixture(scope="module")
def llm():
    return LLM("demo", num_blocks=256, max_num_seqs=8, max_num_batched_tokens=512)


def answers(llm, *options):
    """The first answer to each SamplingParams."""
    params = [SamplingParams(**{"seed": i, **o}) for i, o in enumerate(options)]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def answer(llm, form, **options):
    return answers(llm, {"structured_outputs": form, "max_tokens": 64, **options})[0]


@settings(max_examples=8)
@given(wanted=st.lists(st.tuples(schemas, st.sampled_from([0, 1, 2]), st.booleans()), max_size=6))
def test_whole_answers_of_random_schemas_are_valid(llm, wanted):
    options = [
        {
            "structured_outputs": StructuredOutputsParams(json=schema, disable_any_whitespace=bare),
            "temperature": temperature,
            "max_tokens": 80,
            "logprobs": None if bare else 1,
        }
        for schema, temperature, bare in wanted
    ]
    for (schema, *_), done in zip(wanted, answers(llm, *options), strict=True):
        if done.finish_reason == "stop":
            validate(json.loads(done.text), schema)
        else:
            assert done.finish_reason == "length"
            assert len(done.token_ids) == 80


def test_forms_beside_each_other_and_beside_free_answers(llm):
    plain = {"temperature": 0, "max_tokens": 12}
    forms = (YES_NO, {"regex": r"[a-f]{3}-\d{2}"}, {"grammar": 'root ::= "a" "b"* "c"'})
    one, *formed, other = answers(
        llm, plain, *({"structured_outputs": f, "max_tokens": 30} for f in forms), plain
    )
    assert one.token_ids == other.token_ids == answers(llm, plain)[0].token_ids
    for done, pattern in zip(formed, ["yes|no", r"[a-f]{3}-\d{2}", "ab*c?"], strict=True):
        assert re.fullmatch(pattern, done.text)


def test_the_first_answer_of_a_form_is_like_the_second(llm):
    first, second = (answer(llm, {"json_object": True}, seed=7) for _ in range(2))
    assert first.token_ids == second.token_ids


def test_an_answer_that_can_only_end_ends_before_min_tokens(llm):
    done = answer(llm, YES_NO, min_tokens=30)
    assert (done.finish_reason, len(done.token_ids) < 30) == ("stop", True)
    assert done.text in ("yes", "no")
    longer = answer(llm, {"regex": "[ab]+"}, min_tokens=20, max_tokens=30)
    assert len(longer.token_ids) >= 20


def test_an_answer_that_ignores_the_end_stays_within_its_form(llm):
    done = answer(llm, YES_NO, ignore_eos=True, max_tokens=9)
    assert len(done.token_ids) == 9
    assert done.text in ("yes", "no")


@pytest.mark.parametrize("option", ["allowed_token_ids", "bad_words"])
def test_a_grammar_and_a_ban_that_leave_nothing_end_the_answer_with_an_error(llm, option):
    limit = [300] if option == "allowed_token_ids" else ["q"]
    bad = {"structured_outputs": {"regex": "q"}, option: limit}
    failed, good = answers(llm, bad, {"structured_outputs": YES_NO})
    assert failed.finish_reason == "error"
    assert re.search(f"the grammar and .*{option}", failed.error)
    assert good.text in ("yes", "no")


def test_a_bias_chooses_within_the_form(llm):
    no = llm.engine.model.tokenizer.encode("no", add_special_tokens=False)[0]
    assert answer(llm, YES_NO, logit_bias={no: 100}).text == "no"


def test_thoughts_up_to_a_budget_and_then_the_form(llm):
    end = llm.engine.model.tokenizer.encode("#", add_special_tokens=False)
    thinking = {"start": [], "end": end, "is_open": True, "budget": 6}
    done = answer(llm, YES_NO, thinking=thinking, temperature=0)
    assert done.text.rpartition("#")[2] in ("yes", "no")
    free = {"temperature": 0, "max_tokens": 12, "min_tokens": 12}
    plain, only = answers(llm, free, {"thinking": thinking, **free})
    for thought in done, only:
        assert thought.token_ids[: 6 + len(end)] == [*plain.token_ids[:6], *end]


def test_a_bad_form_changes_nothing(llm):
    before = tiny.counts(llm.engine)
    with pytest.raises(MetalLiteError, match=r"regex: .*unclosed"):
        answer(llm, {"regex": "("})
    assert tiny.counts(llm.engine) == before


def test_fixed_parts_are_not_sampled_one_by_one(llm):
    fixed = {"const": {"temperature_celsius": 1, "location": "somewhere"}}
    before = llm.engine.metrics()
    done = answer(llm, {"json": fixed, "disable_any_whitespace": True})
    assert json.loads(done.text) == fixed["const"]
    after = llm.engine.metrics()
    assert after["steps"] - before["steps"] < len(done.token_ids) / 2
