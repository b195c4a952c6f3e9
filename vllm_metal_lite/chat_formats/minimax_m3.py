"""MiniMax M3: `<invoke name="...">`, and a tag for each argument; a token precedes every tag.

An object has a tag for each key, a list a tag `<item>` for each element; both may be nested.
"""

import re
from typing import Any

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.typed import Tags, read_typed, types_of, value_of

_TAG = "]<]minimax[>["
_START, _END = f"{_TAG}<tool_call>", f"{_TAG}</tool_call>"
_INVOKE, _INVOKE_END = f"{_TAG}<invoke", f"{_TAG}</invoke>"
_NAME = re.compile(r'\s*name="([^"]+)"\s*$')
_MOST_LEVELS = 64  # of lists and objects in a value


def _read(reader: Reader, calls: CallWriter, marker: str) -> Reading[None]:
    return calls.section(lambda: _call(reader, calls), _INVOKE, _INVOKE_END, _END)


def _call(reader: Reader, calls: CallWriter) -> Reading[None]:
    name = _NAME.match((yield from reader.until(">")))
    tool = calls.begin(name[1] if name else None)
    while not (yield from reader.has(_INVOKE_END)):
        yield from reader.expect(f"{_TAG}<")
        key, _ = yield from reader.name(">")
        if key.startswith("/"):
            raise Malformed
        schema = tool.properties.get(key)
        if types_of(schema) == {"string"}:
            tags = Tags(f"{_TAG}</{key}>", f"{_TAG}<", f"{_TAG}<{{}}>")
            yield from read_typed(reader, calls, tool, key, tags)
        else:
            calls.key(key)
            calls.value((yield from _value(reader, key, schema, _MOST_LEVELS)))
    calls.end()


def _value(reader: Reader, key: str, schema: Any, levels: int) -> Reading[Any]:
    """The value of a tag that is open, and its end."""
    if not levels:
        raise Malformed
    schema = schema if isinstance(schema, dict) else {}
    parts = schema.get("properties")
    parts = parts if isinstance(parts, dict) else {}
    found: list[tuple[str, Any]] = []
    while True:
        text = yield from reader.until(f"{_TAG}<")
        inner = yield from reader.until(">")
        if inner == f"/{key}":
            break
        part = schema.get("items", {}) if inner == "item" else parts.get(inner, {})
        found.append((inner, (yield from _value(reader, inner, part, levels - 1))))
    types = types_of(schema)
    if not found:
        if not text.strip() and types in ({"array"}, {"object"}):
            return [] if types == {"array"} else {}
        return value_of(text, schema)
    is_list = all(inner == "item" for inner, _ in found) and types != {"object"}
    return [value for _, value in found] if is_list else dict(found)


MINIMAX_M3 = ChatFormat(
    "minimax_m3",
    (_START,),
    (_END,),
    _read,
    think_start="<mm:think>",
    think_end="</mm:think>",
    dropped=("</mm:think>",),  # begins an answer without thoughts
)
