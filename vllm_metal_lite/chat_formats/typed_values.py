"""The JSON value of a text that a model wrote without quotes, or as Python writes it.

3           the number 3, or the text "3" if the schema has a string
True        the value true, or the text "True"
{'a': 1}    an object, as JSON has it or as Python has it
"""

import ast
import json
from collections.abc import Collection
from contextlib import suppress
from typing import Any
from warnings import catch_warnings

from vllm_metal_lite.chat_formats.reader import Malformed, loads, loads_or
from vllm_metal_lite.chat_formats.schema import JSON_TYPES

_NO_JSON = object()


def is_json(text: str) -> bool:
    return loads_or(_NO_JSON, text.strip()) is not _NO_JSON


def value_of(text: str, types: Collection[str]) -> Any:
    """A value of one of `types` (none: of any); text that does not fit stays a string."""
    value = loads(text.strip()) if is_json(text) else _of_python(text.strip(), text)
    kind = JSON_TYPES[type(value)]
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    if fits and kind != "string":
        return value
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return int(value)
    return text  # a string is as written


def _of_python(text: str, default: str) -> Any:
    """A list, a dict or a constant as Python writes it."""
    if text not in CONSTANTS and text[:1] not in ("{", "["):
        return default
    with suppress(Malformed):
        return python_value(text)
    return default


_JSON_NAMES = {"true": True, "false": False, "null": None}
CONSTANTS = "True", "False", "None", *_JSON_NAMES


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def python_value(text: str) -> Any:
    """The value of a Python literal with a JSON form, or of a JSON constant.  Raises Malformed."""
    try:
        with catch_warnings(action="ignore"):  # escapes that Python does not know cause warnings
            tree = ast.parse(text, mode="eval")
        value = ast.literal_eval(_JsonNames().visit(tree))
        return json.loads(json.dumps(value, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None
