"""Each format holds a call to its tool's schema, or refuses the schema: random walks."""

from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given, settings

from tests.chat_formats.test_grammars import EITHER, ODD, REFERRING, RICH
from tests.support.chat.json_schemas import schemas
from tests.support.chat.text import TOOLS, parse
from tests.support.chat.writers import RAW_STRINGS, WRITERS
from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.chat_formats.tool import Tool

llguidance = pytest.importorskip("llguidance")
structured = pytest.importorskip("vllm_metal_lite.server.structured")

walks_of = pytest.importorskip("tests.support.chat.walks")

walks, compiled, REQUIRED = walks_of.walks, walks_of.compiled, walks_of.REQUIRED
NAMES = list(WRITERS)
TEXT, INT, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}


def one(schema, **more):
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], **more}


SCHEMAS = {
    "required without a property": {"type": "object", "required": ["z"]},
    "a property that is false": one(INT) | {"properties": {"x": INT, "y": False}},
    "additional": one(one(TEXT, additionalProperties=INT)),
    "only additional": one({"type": "object", "additionalProperties": INT}),
    "none additional": one({"type": "object", "additionalProperties": False}),
    "patterns": one({"type": "object", "patternProperties": {"a": INT}, "minProperties": 1}),
    "few": one(INT, maxProperties=1) | {"properties": {"x": INT, "y": INT}},
    "prefix": one({"type": "array", "prefixItems": [INT, TEXT], "minItems": 2}),
    "items": one({"type": "array", "items": INT, "minItems": 1, "maxItems": 2}),
    "no items": one({"type": "array", "items": INT, "maxItems": 0}),
    "one item": one({"type": "array", "items": {"enum": ["a", 2]}, "maxItems": 1}),
    "length": one({"type": "string", "minLength": 2, "maxLength": 3}),
    "pattern": one({"type": "string", "pattern": "^a[/b]{2}$"}),
    "part of a text": one({"type": "string", "pattern": "a|b/"}),
    "anchors within": one({"type": "string", "pattern": "^a|b$"}),
    "lengths within": one({"type": "array", "items": {"type": "string", "minLength": 3}}),
    "texts or numbers": one({"enum": ["1", 2, "true", None, 1.5, "a\n", "", "\nb"]}),
    "a text or a small number": one({"anyOf": [TEXT, {"type": "integer", "maximum": 5}]}),
    "a number or a word": one({"anyOf": [INT, {"const": "auto"}, NULL]}),
    "a text or one number": one({"anyOf": [TEXT, {"const": 5}]}),
    "a text or nothing": one({"type": ["string", "null"], "minLength": 2}),
    "any with a limit": one({"minimum": 3, "minLength": 2}),
    "types by kind": one({"type": "string", "enum": ["a", 1]}),
    "all of": one({"allOf": [{"type": ["integer", "string"]}, {"type": ["number", "null"]}]}),
    "all of limits": one({"allOf": [INT | {"minimum": 3}, {"minimum": 1, "maximum": 9}]}),
    "all of names": one({"allOf": [one(INT, additionalProperties=False), one({"minimum": 3})]}),
    "all of values": one({"allOf": [{"enum": [1, 2, "a"]}, {"enum": [2, "a", True]}, TEXT]}),
    "one of values": one({"allOf": [{"enum": [1, 2]}, {"const": 2}]}),
    "beside": one({"$ref": "#/$defs/a", "enum": [2, 3]}) | {"$defs": {"a": {"enum": [1, 2]}}},
    "anchor": one({"$ref": "#n"}) | {"$defs": {"n": {"$anchor": "n", "type": "integer"}}},
    "many values": one({"enum": [f"value {i}" for i in range(2500)]}),
    "marks in values": one({"enum": ["</parameter>", '<|"|>', "it's", 'a"b', "\\", "a</b>"]}),
    "values that are objects": one({"enum": [{"a": [None, True, "'"]}, [1.0], -1]}),
    "shared parts": RICH.parameters,
    "parts that refer to parts": REFERRING.parameters,
    "odd names": ODD.parameters,
    "a root that refers": EITHER.parameters,
    "many types": TOOLS[1].parameters,
    "either": one(TEXT) | {"anyOf": [{"required": ["y"]}, {"properties": {"y": INT}}]},
}
# These no format holds.
ENDLESS = one(TEXT) | {"$defs": {"n": one({"$ref": "#/$defs/m"}), "m": {"$ref": "#/$defs/n"}}}
BAD = {
    "not": one({"not": INT}), "if": one(INT) | {"if": one(INT), "then": {"required": ["y"]}},
    "propertyNames": one(INT, propertyNames={"maxLength": 1}), "strng": one({"type": "strng"}),
    "dependentRequired": one(INT, dependentRequired={"x": ["y"]}), "enum": one({"enum": "abc"}),
    "unevaluated": one(INT, unevaluatedProperties=False), "missing": one({"$ref": "#/$defs/z"}),
    "contains": one({"type": "array", "contains": {}}), "itself": one({"$ref": "#"}),
    "required": ENDLESS | {"properties": {"x": {"$ref": "#/$defs/n"}}},
    "items": ENDLESS | {"properties": {"x": {"items": {"$ref": "#/$defs/n"}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", SCHEMAS)
def test_calls_are_valid_or_the_schema_is_refused(name, kind):
    tool = Tool("put", "", SCHEMAS[kind], strict=True)
    for answer, arguments in walks(name, tool):
        errors = [*jsonschema.Draft202012Validator(tool.parameters).iter_errors(arguments)]
        assert not errors, (answer, arguments, errors[0].message)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=max(walks_of.WALKS, 12), deadline=None)
@given(schema=schemas)
def test_calls_of_random_schemas_are_valid(name, schema):
    parts = {key: value for key, value in schema.items() if key != "$defs"}
    tool = Tool("put", "", one(parts) | {"$defs": schema["$defs"]}, strict=True)
    for answer, arguments in walks(name, tool, 2):
        errors = [*jsonschema.Draft202012Validator(tool.parameters).iter_errors(arguments)]
        assert not errors, (answer, arguments, errors[0].message)


@pytest.mark.parametrize("name", RAW_STRINGS)
@pytest.mark.parametrize("limits", [{"pattern": "a|b/"}, {"minLength": 60}], ids=str)
def test_a_string_ends_at_its_mark_whatever_its_limits_are(name, limits):
    tool = Tool("put", "", one({"type": "string", **limits}), strict=True)
    for special in False, True:
        if (found := compiled(name, tool, special)) is None:
            continue
        for start, is_taken in ("a" * 60, True), ("!", False):
            before, after = WRITERS[name]([("put", {"x": f"{start}987"})]).split("987")
            mark = f"{after.split('>')[0]}>"  # a longer string would contain the mark
            tokens = walks_of.tokens_of(name, special).encode(before + mark)
            assert (found.deep_copy().try_consume_tokens(tokens) == len(tokens)) is is_taken


# Names of tools and arguments, between marks.
_WORDS = (
    "~a b~ a~a ~a\nb~<~>~a>b~a<b~\"~a\"b~'a'~user's~filter[]~key(s)~xml:lang~a,b~a=b~-A~a.b~$x"
    '~{a}~a}~é~name=a~[a~\\~a" string="true~functions.a~a:0~/a~</parameter>~true~#a'
)
WORDS = _WORDS.split("~")
PLAIN = "-A", "a.b", "$x", "a_b", "functions.a"


@pytest.mark.parametrize("name", NAMES)
def test_names_are_read_or_not_offered(name):
    for word in WORDS:
        tool = Tool("put", "", one(INT, additionalProperties=False))
        tool.parameters.update(properties={word: INT}, required=[word])
        assert compiled(name, tool) or word not in PLAIN
        for _, arguments in walks(name, tool, 2):
            assert arguments.keys() == {word}
        if word and word not in WRITERS[name]([("put", {})]):
            tool = Tool(word, "", one(INT))
            assert compiled(name, tool) or word not in PLAIN
            for _, arguments in walks(name, tool, 2):
                jsonschema.validate(arguments, tool.parameters)
    some = one(INT) | {"properties": {"x": INT} | dict.fromkeys(WORDS, INT)}
    assert [*walks(name, Tool("put", "", some), 9)]


@pytest.mark.parametrize("name", WRITERS)
def test_line_breaks_around_a_string_stay(name):
    tool = Tool("put", "", one({"anyOf": [TEXT, NULL]}))
    for text in "a\n", "\n\na\n\n", "\n":
        call = "put", {"x": text}
        assert parse(FORMATS[name], WRITERS[name]([call]), [tool]).called == [call]


def test_errors_name_the_keyword_and_its_place():
    tool = Tool(
        "put", "", one({"type": "array", "items": {"type": "string", "pattern": "a"}}), True
    )
    with pytest.raises(structured.ApiError, match=r"'put'.properties.x.items: .* 'pattern'"):
        structured.answer_form(FORMATS["lfm2"], {}, [tool], REQUIRED, None)
    assert compiled("lfm2", replace(tool, strict=False))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "loose"])
def test_bad_schemas_are_refused_by_all_formats(name, kind, strict):
    assert compiled(name, Tool("put", "", BAD[kind], strict)) is None
