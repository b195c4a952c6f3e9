"""What a tool's schema allows, and references within it."""

import jsonschema
import pytest

from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.chat_formats.schema import Resolver, pointed
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice

COLOR = {"type": "string", "enum": ["red"]}
ROOT = {
    "$defs": {"color": COLOR, "a/b~c": {"type": "null"}, "loop": {"$ref": "#/$defs/loop"}},
    "properties": {"list": {"prefixItems": [COLOR]}},
}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("#", ROOT),
        ("#/$defs/color", COLOR),
        ("#/$defs/a~1b~0c", {"type": "null"}),
        ("#/%24defs/color", COLOR),
        ("#/properties/list/prefixItems/0", COLOR),
        ("#/properties/list/prefixItems/1", None),
        ("#/$defs/none/here", None),
        ("elsewhere", None),
        ("#anchor", None),
    ],
)
def test_pointers(path, found):
    assert pointed(ROOT, path) == found


X, Y = ({"properties": {k: COLOR}, "required": [k]} for k in "xy")
BOTH = {"type": "object", "properties": {"x": COLOR, "y": COLOR}, "required": ["x", "y"]}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"$ref": "#/$defs/color", "title": "c"}, [{**COLOR, "title": "c"}]),
        ({"allOf": [{"$ref": "#/$defs/color"}]}, [COLOR]),
        ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, [COLOR, {"type": "null"}]),
        ({"type": ["string", "null"]}, [{"type": "string"}, {"type": "null"}]),
        ({"$ref": "#/$defs/loop"}, [{}]),
        ({"$ref": "#/$defs/none"}, [{}]),
        (True, [{}]),
        (
            {"type": "array", "items": {"$ref": "#/$defs/color"}},
            [{"type": "array", "items": {"$ref": "#/$defs/color"}}],
        ),
        ({**X, "anyOf": [Y, {}]}, [BOTH, {"type": "object", **X}]),
        ({"allOf": [X, Y]}, [BOTH]),
    ],
)
def test_a_schema_has_plain_alternatives(schema, found):
    assert Resolver(ROOT)(schema) == found


@pytest.mark.parametrize(
    ("part", "types"),
    [
        (lambda other: {"anyOf": [other, other]}, set()),
        (lambda other: other, {"string"}),
        (lambda other: {"type": "object", "properties": {"x": other}}, {"object"}),
    ],
)
def test_short_schemas_that_stand_for_much(part, types):
    parts = {f"a{i}": part({"$ref": f"#/$defs/a{i + 1}"}) for i in range(900)} | {"a900": COLOR}
    tool = Tool("f", parameters={"properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": parts})
    assert tool.types == {"x": types}
    for grammar in filter(None, (chat_format.grammar for chat_format in FORMATS.values())):
        assert len(grammar([tool], ToolChoice(), {}, "")) < 200_000


def test_a_part_stands_alone_with_all_that_it_refers_to():
    root = {
        "type": "object",
        "properties": {
            "const": {"$ref": "#/$defs/color"},
            "next": {"$ref": "#"},
            "as it is": {"const": {"$ref": "#/$defs/color"}},
        },
        "$defs": {"color": COLOR},
    }
    alone = Resolver(root).standalone(root["properties"]["next"])
    good = {"const": "red", "next": {"const": "red"}}, {"as it is": {"$ref": "#/$defs/color"}}
    bad = {"const": "blue"}, {"next": {"const": "blue"}}, {"as it is": "red"}
    is_valid = jsonschema.Draft202012Validator(alone).is_valid
    assert [is_valid(value) for value in (*good, *bad)] == [True] * 2 + [False] * 3
    assert Resolver(root).standalone(COLOR) == COLOR
