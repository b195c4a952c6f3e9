"""Grammars: every answer sampled under one matches it; bad ones are refused with a reason."""

import itertools
import json
import pickle
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from threading import Semaphore
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import validate
from llguidance import LLMatcher, LLTokenizer

from tests.support.chat.guided import allowed, walk
from tests.support.chat.json_schemas import schemas
from vllm_metal_lite.errors import BusyError, SamplingError
from vllm_metal_lite.model.files.tokenizer import load_tokenizer_only
from vllm_metal_lite.sampling.no_token import MASKED, why
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.structured_outputs import build, compiler
from vllm_metal_lite.structured_outputs.compiler import Compiler, check
from vllm_metal_lite.structured_params import StructuredOutputsParams


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer_only("demo")


def constraint(tokenizer, **form):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    return build(params, tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])


def draw(tokenizer, seed: int, most: int = 400, **form) -> str | None:
    """A random answer's text; None: it was too long."""
    limits = constraint(tokenizer, **form)
    eos = tokenizer.eos_token_id
    tokens = walk(limits, tokenizer.vocab_size, np.random.default_rng(seed), most, eos)
    if tokens[-1] != eos:
        return None
    return tokenizer.decode(tokens[:-1])


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@given(schema=schemas, seed=st.integers(0, 1000), bare=st.booleans())
@example(schema=PERSON, seed=1, bare=True)
@example(schema=PERSON, seed=2, bare=False)
def test_answers_of_random_schemas_are_valid(tokenizer, schema, seed, bare):
    text = draw(tokenizer, seed, json=schema, disable_any_whitespace=bare)
    if text is not None:
        validate(json.loads(text), schema)


@pytest.mark.parametrize("seed", range(4))
def test_other_forms(tokenizer, seed):
    assert re.fullmatch(r"[ab]{2,4}-\d", draw(tokenizer, seed, regex=r"[ab]{2,4}-\d"))
    assert draw(tokenizer, seed, choice=["yes", "no", "y"]) in ("yes", "no", "y")
    lark = 'start: "(" start? ")"'
    assert re.fullmatch(r"\(+\)+", draw(tokenizer, seed, grammar=lark))
    gbnf = 'root ::= "a" root | "b"'
    assert re.fullmatch("a*b", draw(tokenizer, seed, grammar=gbnf))


WORDS = st.sampled_from(["<|user|>", "<|end|>", "a<|pad|", "<|pad|>b", "|><|user|><", "x"])


@given(words=st.lists(WORDS, min_size=1, max_size=4), seed=st.integers(0, 9))
@example(words=["<|user|>"], seed=0)
def test_the_text_of_a_special_token_is_spelled_by_others(tokenizer, words, seed):
    """`walk` asserts that the mask allows what is forced."""
    text, many = "".join(words), [f"{word}{i}" for i, word in enumerate(words)]
    assert json.loads(draw(tokenizer, seed, json={"const": text})) == text
    assert draw(tokenizer, seed, choice=many) in many
    assert draw(tokenizer, seed, grammar=f"root ::= {json.dumps(text)}") == text
    pattern = f"{re.escape(text)}[a-z]{{1,3}}{re.escape(text)}"
    limits = constraint(tokenizer, regex=pattern)
    tokens = walk(limits, tokenizer.vocab_size, np.random.default_rng(seed), 99, 1)
    assert not limits.error()
    assert re.fullmatch(pattern, tokenizer.decode(tokens[:-1]))
    assert not set(tokens[:-1]) & set(tokenizer.all_special_ids)


def test_a_grammar_names_special_tokens(tokenizer):
    limits = constraint(tokenizer, grammar='start: <|user|> "a" <[3]>')
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert limits.forced() == [user, *tokenizer.encode("a", add_special_tokens=False), 3]


def test_at_the_end_only_the_end_may_come(tokenizer):
    limits = constraint(tokenizer, choice=["yes"])
    for token in limits.forced():
        limits.accept(token)
    while (ids := allowed(limits, tokenizer.vocab_size)) != {tokenizer.eos_token_id}:
        limits.accept(min(ids))
    limits.accept(tokenizer.eos_token_id)
    assert allowed(limits, tokenizer.vocab_size) == {tokenizer.eos_token_id}
    limits.accept(tokenizer.eos_token_id)  # as in a request that ignores EOS
    limits.rollback(2)
    assert allowed(limits, tokenizer.vocab_size) == {tokenizer.eos_token_id}


def test_forced_tokens_are_the_text_that_must_come(tokenizer):
    schema = {"type": "object", "properties": {"temperature": {"type": "integer"}}}
    schema |= {"required": ["temperature"], "additionalProperties": False}
    limits = constraint(tokenizer, json=schema, disable_any_whitespace=True)
    assert tokenizer.decode(limits.forced()).startswith('{"temp')


def need(schema, **parts):
    """An object that needs a property."""
    return {"type": "object", "properties": {"n": schema}, "required": ["n"], "$defs": parts}


def test_keywords_that_say_nothing(tokenizer):
    """Libraries write such keywords: zod's records say that names are strings."""
    record = {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    schema = need({"type": "object", **record, "maxProperties": 2}, a={"uniqueItems": False})
    drawn = [draw(tokenizer, seed, json=schema) for seed in range(8)]
    for text in filter(None, drawn):
        validate(json.loads(text), schema)
    assert any(drawn)


LOOP_A, LOOP_B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json": {"type": "objekt"}}, "json.*objekt"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": "{"}, "json"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"regex": "("}, r'regex: invalid regex "\(" \(in regex\): unclosed group$'),
        ({"regex": r"(a)\1"}, "regex"),
        ({"grammar": "start: nowhere"}, r'grammar: at 1\(8\): unknown name: "nowhere"$'),
        ({"json": {"not": {}}}, "not"),
        ({"json": {"$ref": "#"}}, "json: no text fits"),
        ({"json": need({"$ref": "#"})}, r"json.properties.n: no text fits: '#' requires itself"),
        (
            {"json": {"items": {"$ref": "#/items"}, "minItems": 1, "type": "array"}},
            "items: no text",
        ),
        ({"json": need({"$ref": "#/$defs/a"}, a=need(LOOP_B), b=need(LOOP_A))}, "requires itself"),
        ({"json": {"anyOf": [LOOP_A, LOOP_B], "$defs": {"a": LOOP_B, "b": LOOP_A}}}, "itself"),
        ({"json": {"allOf": [need(LOOP_A)], "$defs": {"a": {"oneOf": [need(LOOP_A)]}}}}, "itself"),
        ({"grammar": 'start: "a" %json {"items": {"$ref": "#/items"}}'}, "items: no text fits"),
        ({"json": "[1]"}, "json: a schema must be an object"),
        ({"json": {"enum": [object()]}}, "json cannot be written as JSON"),
        ({"json": {"properties": {"a": {"items": {"type": "x"}}}}}, "json.properties.a.items: .*x"),
        ({"json": {"$defs": {"a": {"type": "x"}}, "$ref": "#/$defs/a"}}, r"json.\$defs.a: .*x"),
        ({"json": {"uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
        ({"grammar": "start: <nowhere>"}, "grammar.*nowhere"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "or use anyOf$"),
        ({}, "must have one"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"choice": []}, "must have one|choice"),
        ({"choice": [1]}, "choice"),
    ],
)
def test_bad_forms_are_refused_with_a_reason(tokenizer, form, words):
    with pytest.raises(SamplingError, match=words):
        constraint(tokenizer, **form)


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(2**53 - 3, 2**53 + 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.decimals(-9, 9, places=2).map(float),
)


@given(number=NUMBERS, within=st.booleans())
def test_a_number_is_written_exactly_or_refused(tokenizer, number, within):
    """llguidance carries numbers as floats, and reads long ones wrongly."""
    form = {"json": {"const": [number] if within else number}}
    text = None
    with suppress(SamplingError):
        text = draw(tokenizer, 0, **form)
    if text is None:
        assert abs(number) >= 2**53 or len(repr(number)) > 15 or abs(number) < 1e-9
        return
    written = json.loads(text, parse_float=Fraction, parse_int=Fraction)
    assert written == ([Fraction(repr(number))] if within else Fraction(repr(number)))


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"items": {"type": "integer", "multipleOf": 2**53 + 1}}},
        {"json": {"items": {"type": "integer", "minimum": 2**53 + 1}}},
        {"json": {"items": {"type": "integer", "exclusiveMaximum": -(2**53) - 1}}},
        {"json": {"items": {"enum": ["a", -(2**53) - 1]}}},
        {"json": '{"items": {"const": 1e400}}'},
        {"json": {"parts": {"items": {"const": 2**53 + 1}}, "$ref": "#/parts/items"}},
        {"grammar": 'start: "a" %json {"items": {"const": 9007199254740993}}'},
    ],
    ids=str,
)
def test_numbers_that_would_change_are_refused_with_their_place(form):
    with pytest.raises(
        SamplingError, match=r"\.items\.\w+(\.1)?: (inf|[-\d.e]+) cannot be kept exactly"
    ):
        check(StructuredOutputsParams(**form))


@pytest.mark.parametrize("end", [2**63 - 1, 2**64, 1.7976931348623157e308])
def test_limits_beyond_floats_are_narrowed(tokenizer, end):
    """Schemas of many tools hold the limits of int64 or double."""
    narrow = {"type": "integer", "minimum": 1 - 2**53, "maximum": 2**53 - 1}
    for wide in (
        {"minimum": -end, "maximum": end},
        {"exclusiveMinimum": -end, "exclusiveMaximum": end},
        {"exclusiveMinimum": -end, "exclusiveMaximum": end, **narrow},
    ):
        assert draw(tokenizer, 1, json={"type": "integer", **wide}) == draw(
            tokenizer, 1, json=narrow
        )


def test_numbers_are_the_same_in_other_spellings(tokenizer):
    assert draw(tokenizer, 0, json='{"const": 4201013591627474.0}') == "4201013591627474"
    lark = 'start: %json {"const": 4201013591627474.0} "x" %json {"const": 0.10}'
    assert draw(tokenizer, 0, grammar=lark) == "4201013591627474x0.1"
    check(StructuredOutputsParams(json={"type": "string", "minLength": 2.0}))
    check(StructuredOutputsParams(json={"type": "number", "default": float("inf")}))


@pytest.mark.parametrize("name", ["phone", "binary", "password", "int64", "regex"])
def test_formats_that_llguidance_does_not_know_are_annotations(tokenizer, name):
    plain = {"type": "string", "maxLength": 4}
    part = {**plain, "format": name}
    for schema in part, {"anyOf": [part]}, {"components": {"x": part}, "$ref": "#/components/x"}:
        assert draw(tokenizer, 3, json=schema) == draw(tokenizer, 3, json=plain)
        check(StructuredOutputsParams(grammar=f"start: %json {json.dumps(schema)}"))
    named = {"properties": {"format": {"const": "x"}}, "required": ["format"]}
    assert "format" in draw(tokenizer, 3, json={"type": "object", **named})
    data = {"const": {"format": name}}
    assert json.loads(draw(tokenizer, 3, json=data)) == data["const"]


def test_objects_are_closed_and_data_is_not(tokenizer):
    schema = {"enum": [{"properties": {}}]}
    text = draw(tokenizer, 0, json=schema, disable_additional_properties=True)
    assert json.loads(text) == {"properties": {}}


def test_a_model_without_a_tokenizer():
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(SamplingError, match="tokenizer"):
        build(params, None, 10, [1])


PROPERTIES = {f"p{i}": {"type": "null"} for i in range(3000)}
HOSTILE = {
    "characters": ({"regex": "a" * 2_000_000}, "2000000 characters"),
    "choices": ({"choice": ["abcdefgh" * 10] * 10_000}, "800000 characters"),
    "rules": ({"grammar": "start: r0\n" + "r: r\n" * 5_000}, "5002 lines"),
    "gbnf": ({"grammar": "root ::= r0\n" + 'r0 ::= "a"\n' * 600}, "602 lines, and at most 500"),
    "neither": ({"grammar": 'root: "a"'}, "needs a rule `start:` .Lark. or `root ::=` .GBNF., got"),
    "nesting": ({"regex": "(" * 90_000 + "a" + ")" * 90_000}, "regex"),
    "json": ({"json": '{"items":' * 10_000 + "{}" + "}" * 10_000}, "recursion"),
    "properties": ({"json": {"type": "object", "properties": PROPERTIES}}, "json: "),
    "quotes": ({"grammar": "start: " + '"\\' * 90_000}, "grammar: .*lexer error"),
    "space": ({"json": "{}", "whitespace_pattern": "("}, "json: whitespace_pattern: .*unclosed"),
    "spaces": ({"json": "{}", "whitespace_pattern": "a" * 200_001}, "pattern: 200001 characters"),
    "echo": ({"regex": "(special token"}, "regex: .*unclosed group"),
    "terminal": ({"grammar": "start: A\nA: <x>"}, "special tokens .* cannot be used in terminals"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused(tokenizer, name):
    form, words = HOSTILE[name]
    with pytest.raises(SamplingError, match=words):
        check(StructuredOutputsParams(**form))


def chain(count: int) -> dict:
    """A schema whose parts refer to each other, each to the next."""
    parts = {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(count)
    }
    return {"$defs": {**parts, f"a{count}": {"type": "null"}}, "$ref": "#/$defs/a0"}


RULES = "".join(f"r{i}: r{i + 1}\n" for i in range(3500))


@pytest.mark.parametrize(
    "form",
    [{"json": chain(1500)}, {"grammar": f'start: r0\n{RULES}r3500: "a"'}],
    ids=["json", "grammar"],
)
def test_long_chains_of_references_do_not_overflow_the_stack(tokenizer, form):
    """llguidance recurses; an overflow would end the process."""
    check(StructuredOutputsParams(**form))
    constraint(tokenizer, **form)


def test_a_grammar_that_becomes_too_complex_leaves_no_token(tokenizer):
    """llguidance would allow the end: the answer would be cut without a word."""
    limits = constraint(tokenizer, regex="(?:" * 100 + "a" + "){0,2}" * 100)
    a = tokenizer.encode("a", add_special_tokens=False)[-1]
    for _ in range(10):
        ids = allowed(limits, tokenizer.vocab_size)
        if not ids:
            error = "the grammar failed: lexer error: too many expressions constructed"
            assert why(MASKED, SamplingParams(), 2, True, limits.error()).endswith(error)
            return
        assert not limits.error()
        limits.accept(a)
    pytest.fail("the grammar is not complex enough")


@pytest.mark.parametrize("more", [-100, 100])
def test_a_model_of_more_or_fewer_tokens_than_its_tokenizer(tokenizer, more):
    size = tokenizer.vocab_size + more
    params = SamplingParams(structured_outputs={"regex": "[a-z]+"})
    other = load_tokenizer_only("demo")  # grammars are kept by tokenizer
    limits = build(params, other, size, [tokenizer.eos_token_id])
    ids = allowed(limits, size)
    assert tokenizer.encode("a", add_special_tokens=False)[-1] in ids
    assert max(ids) < min(size, tokenizer.vocab_size)


def test_answers_under_one_grammar_do_not_mix(tokenizer):
    first, second = (constraint(tokenizer, regex="[ab]c") for _ in range(2))
    at_start = allowed(second, tokenizer.vocab_size)
    first.accept(min(at_start))
    assert allowed(second, tokenizer.vocab_size) == at_start
    assert allowed(first, tokenizer.vocab_size) != at_start


def test_forms_pass_through_a_pipe():
    params = SamplingParams(structured_outputs={"json": PERSON}, thinking={"start": [], "end": [1]})
    assert pickle.loads(pickle.dumps(params)) == params


def test_tokens_are_not_checked_without_a_model():
    check(StructuredOutputsParams(grammar='start: <[151657]> "a" <[^200000-200005,7]> <x>'))


def test_texts_and_comments_of_a_grammar_stay(tokenizer):
    text = "%json { } <x> <[3]> // %json {"
    lark = f'start: "{text}" /a%json {{0}}/ // %json {{"const": 1e400}} <x>'
    check(StructuredOutputsParams(grammar=lark))
    assert draw(tokenizer, 0, grammar=lark) == f"{text}a%json"


def test_a_grammar_that_finds_all_threads_busy_may_come_again(monkeypatch):
    own, yes = Compiler(LLTokenizer("byte")), StructuredOutputsParams(choice=["yes"])
    monkeypatch.setattr(compiler, "MAX_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_free_threads", Semaphore(0))
        with pytest.raises(BusyError, match="other grammars are being compiled; try again"):
            own.compile(yes)
    monkeypatch.undo()
    own.compile(yes)


@pytest.fixture
def compiled(monkeypatch):
    """A mock with a call for each compilation."""
    mock = Mock(side_effect=LLMatcher)
    monkeypatch.setattr(compiler, "LLMatcher", mock)
    return mock


def test_the_place_of_an_error_is_sought_no_longer_than_a_caller_waits(compiled, monkeypatch):
    monkeypatch.setattr(compiler, "monotonic", itertools.count().__next__)
    parts = {f"p{i}": {"type": "null"} for i in range(50)}
    with pytest.raises(SamplingError, match=r"json: .*not"):
        check(StructuredOutputsParams(json={"properties": {**parts, "bad": {"not": {}}}}))
    assert compiled.call_count <= 2 + compiler.MAX_SECONDS


def test_schemas_may_refer_to_themselves_where_they_need_not(tokenizer):
    """Many references: each needs the next one, and only the last ends."""
    parts = {f"a{i}": need({"$ref": f"#/$defs/a{i + 1}"}) for i in range(500)}
    parts["a500"] = {"anyOf": [{"$ref": "#/$defs/a0"}, {"type": "null"}]}
    check(StructuredOutputsParams(json={"$ref": "#/$defs/a0", "$defs": parts}))
    node = {"type": "object", "properties": {"next": LOOP_A}, "additionalProperties": False}
    assert draw(tokenizer, 0, json={**LOOP_A, "$defs": {"a": node}})


def test_a_bad_form_is_refused_within_the_time_of_one(monkeypatch):
    def new_matcher(grammar, tokenizer):
        time.sleep(0.15)
        return Mock(is_error=lambda: True, get_error=lambda: "bad")

    monkeypatch.setattr(compiler, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(compiler, "_new_matcher", new_matcher)
    start = time.monotonic()
    with pytest.raises(SamplingError, match="bad"):
        check(StructuredOutputsParams(json={"items": {"items": {"title": "never seen"}}}))
    assert time.monotonic() - start < 0.35


def test_a_grammar_in_use_is_compiled_once(tokenizer, compiled):
    """Many threads ask, other grammars follow, and one text is long."""
    forms = [{"regex": f"x{{{i + 1}}}"} for i in range(12)]
    forms.append({"choice": ["灯" * 30 + str(i) for i in range(5000)]})
    with ThreadPoolExecutor(16) as pool:
        held = list(pool.map(lambda form: constraint(tokenizer, **form), 4 * forms))
    assert len(held) == 4 * len(compiled.call_args_list) == 4 * len(forms)


def test_few_grammars_are_kept_compiled():
    """A short regex may hold much memory."""
    compiler = Compiler(LLTokenizer("byte"))
    for length in range(20):
        compiler.compile(StructuredOutputsParams(regex=f"a{{{100 + length}}}"))
    assert len(compiler._compiled) == 8
