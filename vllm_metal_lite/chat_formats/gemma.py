"""Gemma 4 and FunctionGemma: `call:NAME{key:value}`, with strings between marks of their own.

Keys have no marks; models also write other quotes.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat, Thoughts
from vllm_metal_lite.chat_formats.grammars import (
    SpecialTokens,
    bare_names,
    calls_grammar,
    literal,
    texts,
    until,
)
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.schema_rules import SCALARS, SchemaRules
from vllm_metal_lite.chat_formats.tool import Tool
from vllm_metal_lite.chat_formats.typed_values import value_of


def _value(reader: Reader, quote: str, types: Collection[str]) -> Reading[object]:
    first = yield from reader.peek()
    if first == '"':
        return (yield from reader.json())
    if opened := (yield from _opened(reader, quote)):
        return (yield from reader.until(opened))
    if first == "{":
        reader.take(1)
        members: dict[str, object] = {}
        while (yield from _has_item(reader, "}", is_first=not members)):
            key = yield from _key(reader, quote)
            members[key] = yield from _value(reader, quote, ())
        return members
    if first == "[":
        reader.take(1)
        elements: list[object] = []
        while (yield from _has_item(reader, "]", is_first=not elements)):
            elements.append((yield from _value(reader, quote, ())))
        return elements
    parts: list[str] = []
    yield from reader.before([",", "}", "]"], parts.append)
    text = "".join(parts).strip()
    if quote in text or '"' in text:
        raise Malformed
    return value_of(text, types)


def _key(reader: Reader, quote: str) -> Reading[str]:
    if opened := (yield from _opened(reader, quote)):
        key = yield from reader.until(opened)
        yield from reader.expect(":")
        return key
    key, end = yield from reader.name(":", ",", "}")
    if end != ":":
        raise Malformed
    return key


def _opened(reader: Reader, quote: str) -> Reading[str]:
    """Read the opening mark of a string; "" if no string begins here."""
    for mark in (quote, '"', "'"):
        if (yield from reader.has(mark)):
            return mark
    return ""


def _has_item(reader: Reader, end: str, *, is_first: bool) -> Reading[bool]:
    """Whether an item follows; reads the comma before it, or `end`."""
    if not is_first and not (yield from reader.has(",")):
        yield from reader.expect(end)
        return False
    return not (yield from reader.has(end))


def _format(name: str, start: str, end: str, quote: str, thoughts: Thoughts | None) -> ChatFormat:
    """quote: the mark before and after a string."""

    def read(reader: Reader, calls: CallWriter) -> Reading[None]:
        yield from reader.expect("call:")
        tool_name, _ = yield from calls.name("{")
        tool = calls.begin(tool_name)
        while (yield from _has_item(reader, "}", is_first=not calls.names)):
            key = yield from _key(reader, quote)
            calls.key(key)
            if (yield from reader.has(quote)):
                calls.quote()
                yield from reader.before([quote], calls.string_piece)
                reader.take(len(quote))
                calls.quote()
            else:
                types = tool.types.get(key, ())
                calls.value((yield from _value(reader, quote, types)))
        calls.end()
        yield from reader.has(end)  # a model may end its answer without

    def rule(tool: Tool, special: SpecialTokens, lines: list[str]) -> str:
        arguments = _Rules(quote, special, lines, tool).rule()
        return f"{literal(f'call:{tool.name}')} {arguments} {texts(end, special)}"

    grammar = calls_grammar(rule, bare_names("{"), start=start)
    return ChatFormat(name, (start, quote), (start,), (end,), read, grammar, thoughts)


class _Rules(SchemaRules):
    names = rf"(?![\"']){bare_names(':,}')}"

    def __init__(self, quote: str, special: SpecialTokens, lines: list[str], tool: Tool) -> None:
        self._mark, self._quote = quote, (mark := literal(quote, special))
        rules = [
            "any: string | scalar | list | object",
            f"scalar: %json {json.dumps({'type': SCALARS})}",
            'list: "[" (any ("," any)*)? "]"',
            'object: "{" (pair ("," pair)*)? "}"',
            "pair: key any",
            'key: /[A-Za-z_][A-Za-z0-9_]*/ ":"',
            f"string: {mark} chars",
            until("chars", quote, special),
        ]
        super().__init__(lines, tool, rules)

    def key(self, name: str) -> str:
        return literal(f"{name}:")

    def constants(self, values: Sequence[Any]) -> list[str]:
        strings = [literal(v) for v in values if isinstance(v, str) and self._mark not in v]
        others = [literal(json.dumps(v)) for v in values if not isinstance(v, str)]
        found = [self.add(" | ".join(others), "V")] if others else []
        if strings:
            found.append(f"{self._quote} {self.add(' | '.join(strings), 'V')} {self._quote}")
        return found

    def order(self, names: Mapping[str, Any]) -> list[str]:
        return sorted(names, key=str.lower)


_THOUGHTS = Thoughts("<|channel>thought", "<channel|>")
GEMMA_4 = _format("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', _THOUGHTS)
FUNCTION_GEMMA = _format(
    "function_gemma", "<start_function_call>", "<end_function_call>", "<escape>", None
)
