"""References within a tool's schema."""

import jsonschema
import pytest

from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.chat_formats.grammars import standalone
from vllm_metal_lite.chat_formats.schema import Resolver, pointed
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice

AUTO = ToolChoice()
COLOR = {"type": "string", "enum": ["red"]}
ROOT = {
    "$defs": {"color": COLOR, "a/b~c": {"type": "null"}, "loop": {"$ref": "#/$defs/loop"}},
    "properties": {"list": {"prefixItems": [COLOR]}},
}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("#", ROOT), ("#/$defs/color", COLOR), ("#/$defs/a~1b~0c", {"type": "null"}),
        ("#/%24defs/color", COLOR), ("#/properties/list/prefixItems/0", COLOR),
        ("#/properties/list/prefixItems/1", None), ("#/$defs/none/here", None), ("elsewhere", None),
    ],
)  # fmt: skip
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
        ({"$ref": "#/$defs/loop"}, [{}]), ({"$ref": "#/$defs/none"}, [{}]), (True, [{}]),
        ({"type": "array", "items": {"$ref": "#/$defs/color"}},
         [{"type": "array", "items": {"$ref": "#/$defs/color"}}]),
        ({**X, "anyOf": [Y, {}]}, [BOTH, {"type": "object", **X}]), ({"allOf": [X, Y]}, [BOTH]),
    ],
)  # fmt: skip
def test_a_schema_has_plain_alternatives(schema, found):
    assert Resolver(ROOT)(schema) == found


TWICE = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)}
CHAIN = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(900)} | {"a900": COLOR}
DEEP = {
    f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}}
    for i in range(900)
}


@pytest.mark.parametrize(
    ("parts", "types"), [(TWICE, set()), (CHAIN, {"string"}), (DEEP, {"object"})]
)
def test_short_schemas_that_stand_for_much(parts, types):
    tool = Tool("f", parameters={"properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": parts})
    assert tool.types == {"x": types}
    for chat_format in FORMATS.values():
        assert not chat_format.grammar or len(chat_format.grammar([tool], AUTO, {}, "")) < 200_000


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
    alone = standalone(root["properties"]["next"], root)
    for value in (
        {"const": "red", "next": {"const": "red"}},
        {"as it is": {"$ref": "#/$defs/color"}},
    ):
        jsonschema.validate(value, alone)
    for value in ({"const": "blue"}, {"next": {"const": "blue"}}, {"as it is": "red"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, alone)
    assert standalone(COLOR, root) == COLOR
