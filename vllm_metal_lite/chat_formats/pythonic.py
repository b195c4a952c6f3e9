"""Calls in Python's syntax: LFM2's as a list, `[run(cmd="ls"), now()]`, OLMo 3's one a line.

All arguments of a call come at once, because Python's literals are parsed only when complete.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import SpecialTokens, bare_names, calls_grammar, literal
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.schema_rules import SchemaRules
from vllm_metal_lite.chat_formats.tool import Tool
from vllm_metal_lite.chat_formats.typed_values import CONSTANTS, python_value

# A parameter's name need not be Python's: `-A`, `a.b`, `class`, `two words`.
_KEY = re.compile(r"""[^\n()\[\]{}'"]+""")
_NAMES = r"""(?!\s)[^\n()\[\]{}'",=]+(?<!\s)"""  # names that end at the first `=`


def _read(reader: Reader, calls: CallWriter, *, end: str) -> Reading[None]:
    more = True
    while more:
        yield from reader.has("[")
        yield from calls.guard(_call(reader, calls, end), ())
        yield from reader.has(",")
        yield from reader.has("]")
        yield from reader.skip_space()
        reader.recorded = ""  # if the rest is malformed, only the rest becomes text
        # A model may end its answer without `end`.
        more = reader.rest != "" and not (yield from reader.begins(end))


def _call(reader: Reader, calls: CallWriter, end: str) -> Reading[None]:
    name, _ = yield from calls.name("(")
    calls.begin(name)
    arguments = yield from _arguments(reader, end)
    pairs = [_key_and_value(text) for text in arguments if text.strip()]
    for key, value in pairs:
        calls.key(key)
        calls.value(value)
    calls.end()


def _arguments(reader: Reader, end: str) -> Reading[list[str]]:
    """The text of each argument, up to the bracket after them, which is read.

    Raises Malformed before `end`, and CutShort.
    """
    arguments: list[str] = []
    parts: list[str] = []  # pieces of the argument that has begun
    depth = 1
    while depth:
        mark = yield from reader.before([*"\"'()[]{},", end], parts.append)
        if mark == end:
            raise Malformed
        if mark in "\"'":
            yield from _string(reader, mark, parts.append)
            continue
        reader.take(1)
        depth += (mark in "([{") - (mark in ")]}")
        if depth == 0 or (depth == 1 and mark == ","):
            arguments.append("".join(parts))
            parts.clear()
        else:
            parts.append(mark)
    return arguments


def _string(reader: Reader, quote: str, pass_on: Callable[[str], None]) -> Reading[None]:
    """Pass a string on in three quotes, because models write line breaks into any string."""
    triple = quote * 3
    opened = triple if (yield from reader.begins(triple)) else reader.take(1)
    pass_on(triple)
    while (yield from reader.before(["\\", opened], pass_on)) != opened:
        while len(reader.rest) < 2:
            yield from reader.need()
        pass_on(reader.take(2))
    reader.take(len(opened))
    pass_on(triple)


def _key_and_value(argument: str) -> tuple[str, object]:
    """An argument; its value is a literal, or a word without quotes.  Raises Malformed."""
    key, value = (text.strip() for text in argument.partition("=")[::2])
    if not _KEY.fullmatch(key) or not value:
        raise Malformed
    if value.isidentifier() and value not in CONSTANTS:
        return key, value
    return key, python_value(f"({value}\n)")  # a comment may end the value


class _Rules(SchemaRules):
    """Python's literals; also JSON's constants, which the models write too."""

    separator = ", "

    def __init__(self, lines: list[str], tool: Tool) -> None:
        # Strings may have only escapes that mean the same in Python and in JSON.
        rules = [
            "any: string | number | boolean | null | list | object",
            f"number: %json {json.dumps({'type': 'number'})}",
            'boolean: "True" | "False" | "true" | "false"',
            'null: "None" | "null"',
            'list: "[" (any (", " any)*)? "]"',
            'object: "{" (pair (", " pair)*)? "}"',
            "pair: key any",
            'key: string ": "',
            r"""string: /"([^"\\\x00-\x1f]|\\["\\nrt])*"|'([^'\\\x00-\x1f]|\\['\\nrt])*'/""",
        ]
        super().__init__(lines, tool, rules)

    def whole(self, schema: Mapping[str, Any]) -> str:
        return self.pairs(schema, lambda name: literal(f"{name}="), _NAMES, "")

    def key(self, name: str) -> str:
        return f'{self.constants([name])[0]} ": "'

    def constants(self, values: Sequence[Any]) -> list[str]:
        spellings = dict.fromkeys(chain(*map(_spellings, values)))
        return [self.add(" | ".join(map(literal, spellings)), "V")]

    def scalar(self, schema: Mapping[str, Any]) -> str:
        return "boolean" if schema["type"] == "boolean" else super().scalar(schema)


def _spellings(value: Any) -> tuple[str, ...]:
    return json.dumps(value, ensure_ascii=False), repr(value)


def _format(name: str, signs: tuple[str, ...], start: str, end: str, **around: str) -> ChatFormat:
    """around: see `calls_grammar`."""

    def rule(tool: Tool, special: SpecialTokens, lines: list[str]) -> str:
        return f'{literal(f"{tool.name}(")} {_Rules(lines, tool).rule()} ")"'

    grammar = calls_grammar(rule, bare_names("(["), start=start, **around)
    return ChatFormat(name, signs, (start,), (end,), partial(_read, end=end), grammar)


_LFM2, _LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
_OLMO, _OLMO_END = "<function_calls>", "</function_calls>"
LFM2 = _format("lfm2", (_LFM2,), _LFM2, _LFM2_END, opening="[", between=", ", close=f"]{_LFM2_END}")
OLMO_3 = _format("olmo3", ("<functions>", _OLMO), _OLMO, _OLMO_END, between="\n", close=_OLMO_END)
