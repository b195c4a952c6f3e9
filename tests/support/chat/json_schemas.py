"""Random JSON schemas, small enough that a random answer ends."""

from typing import Any

from hypothesis import strategies as st

_NAMES = st.text("abcdefgh", min_size=1, max_size=4)
_INTEGERS = [{"minimum": -3, "exclusiveMaximum": 20}, {"multipleOf": 3}]
_STRINGS = [{"maxLength": 4}, {"pattern": "^[a-c]{2,3}$"}, {"format": "date"}]
_PLAIN = st.sampled_from(
    [
        *({"type": "integer"} | limits for limits in _INTEGERS),
        *({"type": "string"} | limits for limits in _STRINGS),
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": ["string", "null"], "maxLength": 2},
        *({"type": name} for name in ("boolean", "null")),
        {"enum": ["a", 1, None, [2]]},
        {"const": {"x": 1}},
        {"$ref": "#/$defs/shared"},
    ]
)


def _object(properties: dict[str, Any], num_required: int, more: bool | dict[str, Any]) -> Any:
    required = sorted(properties)[:num_required]
    schema = {"type": "object", "properties": properties, "required": required}
    return schema | {"additionalProperties": more}


def _compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda parts: {"type": "array", "prefixItems": parts, "items": False}, few),
        st.builds(
            _object,
            st.dictionaries(_NAMES, inner, max_size=3),
            st.integers(0, 3),
            st.sampled_from([False, {"type": "boolean"}]),
        ),
        few.map(lambda parts: {"anyOf": parts}),
        st.builds(lambda part: {"allOf": [part, {"title": "all of one"}]}, inner),
    )


schemas = st.recursive(_PLAIN, _compound, max_leaves=5).map(
    lambda schema: {**schema, "$defs": {"shared": {"type": "string", "enum": ["s", "t"]}}}
)
