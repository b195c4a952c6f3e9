"""Calls in Python's syntax: LFM2's as a list, `[run(cmd="ls"), now()]`, OLMo 3's one a line.

All arguments of a call come at once, because Python's literals are parsed only when complete.
"""

import ast
import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import SpecialTokens, calls_grammar, literal
from vllm_metal_lite.chat_formats.reader import CutShort, Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.schema_rules import SchemaRules
from vllm_metal_lite.chat_formats.tool import Tool
from vllm_metal_lite.chat_formats.typed import JSON_NAMES, python_value

_STRING = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_STAND_IN = "\ua66e"  # a letter of Python's names that no model writes
# Names of tools and parameters need not be Python's: `-A`, `get-weather`, `class`.
_NAMES = re.compile(rf"""{_STRING}|(?P<name>[^\s()\[\]{{}},'"=]+)(?=\s*[(=])""", re.DOTALL)
_Node = ast.expr | ast.stmt


def _read(reader: Reader, calls: CallWriter, *, end: str) -> Reading[None]:
    text = yield from _until(reader, end)
    names: dict[str, str] = {}
    source = _NAMES.sub(partial(_stand_in, names), text.strip())
    try:
        elements = _elements(source)
    except Malformed:  # models write line breaks into strings
        source = re.sub(_STRING, _escaped, source, flags=re.DOTALL)
        elements = _elements(source)
    for element in elements:
        match element:
            case ast.Call(ast.Name(stand_in), [], keywords):
                name = names.get(stand_in)  # None for a name in parentheses
            case _:
                name, keywords = None, []
        if not calls.knows(name) and not reader.taken:  # the calls before it are no text
            reader.record(_written(source, names, element, elements[-1]))
        calls.begin(name)
        try:
            values = {names[str(k.arg)]: _value(k.value) for k in keywords}
        except (Malformed, KeyError):
            calls.arguments(_written(source, names, element, element))
            calls.cut()
            continue
        for key, value in values.items():
            calls.key(key)
            calls.value(value)
        calls.end()


def _written(source: str, names: dict[str, str], first: _Node, last: _Node) -> str:
    """Elements as they stand in the source, with the names that the model wrote."""
    whole = ast.copy_location(ast.Pass(), first)
    whole.end_lineno, whole.end_col_offset = last.end_lineno, last.end_col_offset
    text = ast.get_source_segment(source, whole) or ""
    return re.sub(rf"{_STAND_IN}\d+", lambda match: names.get(match[0], match[0]), text)


def _value(node: ast.expr) -> object:
    """A literal; a word without quotes is a string."""
    if isinstance(node, ast.Name) and node.id not in JSON_NAMES:
        return node.id
    return python_value(node)


def _stand_in(names: dict[str, str], match: re.Match[str]) -> str:
    """A valid Python name in place of a tool's or a parameter's; strings stay unchanged."""
    if match["name"] is None:
        return match[0]
    stand_in = f"{_STAND_IN}{len(names)}"
    names[stand_in] = match["name"]
    return stand_in


def _escaped(string: re.Match[str]) -> str:
    """A string with its line breaks escaped."""
    return re.sub(r"(\\.)|[\r\n]", lambda m: m[1] or repr(m[0])[1:-1], string[0], flags=re.DOTALL)


def _until(reader: Reader, end: str) -> Reading[str]:
    """The text before `end`, which is read too; within a string it is text.  Raises CutShort."""
    before_end = re.compile(rf"((?:{_STRING}|\\.|[^\"'\\])*?){re.escape(end)}", re.DOTALL)
    while not (end in reader.rest and (found := before_end.match(reader.rest))):
        if not (yield from reader.more()):
            reader.take(len(reader.rest))
            raise CutShort
    reader.take(found.end())
    return found[1]


def _elements(source: str) -> list[_Node]:
    """The expected calls: the elements of a list, or the lines.  Raises Malformed."""
    try:
        lines = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None
    values = [line.value if isinstance(line, ast.Expr) else line for line in lines]
    return [e for value in values for e in (value.elts if isinstance(value, ast.List) else [value])]


class _Rules(SchemaRules):
    """Python's literals; also JSON's constants, which the models write too."""

    separator = ", "

    def __init__(self, lines: list[str], root: Mapping[str, Any]) -> None:
        # Strings with those escapes only that mean the same in Python and in JSON.
        rules = [
            "any: string | number | boolean | null | list | object",
            f"number: %json {json.dumps({'type': 'number'})}",
            'boolean: "True" | "False" | "true" | "false"',
            'null: "None" | "null"',
            'list: "[" (any (", " any)*)? "]"',
            'object: "{" (pair (", " pair)*)? "}"',
            'pair: string ": " any',
            r"""string: /"([^"\\\x00-\x1f]|\\["\\nrt])*"|'([^'\\\x00-\x1f]|\\['\\nrt])*'/""",
        ]
        super().__init__(lines, root, rules)

    def keywords(self) -> str:
        """The name of a rule for the arguments of a call; "" for none."""
        if not self._root.get("properties"):
            return ""
        return self.pairs(self._root, lambda name: literal(f"{name}="))

    def key(self, name: str) -> str:
        return f'{self.constant(name)} ": "'

    def constant(self, value: Any) -> str:
        if isinstance(value, bool):
            return f'("{value}" | "{str(value).lower()}")'
        if value is None:
            return "null"
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, str):
            return f"({literal(text)} | {literal(repr(value))})"
        return literal(text)

    def scalar(self, schema: Mapping[str, Any]) -> str:
        kind = schema["type"]
        return kind if kind in ("boolean", "null") else super().scalar(schema)


def _format(name: str, start: str, end: str, **around: str) -> ChatFormat:
    """around: see `calls_grammar`."""

    def rule(tool: Tool, special: SpecialTokens, lines: list[str]) -> str:
        return f'{literal(f"{tool.name}(")} {_Rules(lines, tool.parameters).keywords()} ")"'

    grammar = calls_grammar(rule, start=start, **around)
    return ChatFormat(name, (start,), (end,), partial(_read, end=end), grammar)


_LFM2_END, _OLMO_END = "<|tool_call_end|>", "</function_calls>"
LFM2 = _format(
    "lfm2", "<|tool_call_start|>", _LFM2_END, opening="[", between=", ", close=f"]{_LFM2_END}"
)
OLMO_3 = _format("olmo3", "<function_calls>", _OLMO_END, between="\n", close=_OLMO_END)
