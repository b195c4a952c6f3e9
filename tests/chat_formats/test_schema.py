"""References within a tool's schema."""

import json

import jsonschema
import pytest

from vllm_metal_lite.chat_formats.schema import Resolver, pointed, standalone
from vllm_metal_lite.chat_formats.tool import Tool

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


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"$ref": "#/$defs/color", "title": "c"}, {**COLOR, "title": "c"}),
        ({"allOf": [{"$ref": "#/$defs/color"}]}, COLOR),
        ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]},
         {"anyOf": [COLOR, {"type": "null"}]}),
        ({"$ref": "#/$defs/loop"}, {}),
        ({"$ref": "#/$defs/none"}, {"$ref": "#/$defs/none"}),
        ({"type": "array", "items": {"$ref": "#/$defs/color"}},
         {"type": "array", "items": {"$ref": "#/$defs/color"}}),
        (True, True),
    ],
)  # fmt: skip
def test_a_schema_says_at_its_top_what_it_allows(schema, found):
    assert Resolver(ROOT)(schema) == found


def test_a_short_schema_that_stands_for_millions_stays_short():
    twice = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)}
    tool = Tool("f", parameters={"properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": twice})
    assert len(json.dumps(tool.properties)) < 100_000


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
