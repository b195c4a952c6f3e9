"""Answers' texts through a ChatParser, in pieces of any size."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.events import (
    Arguments,
    Event,
    Reasoning,
    Text,
    ToolCall,
    ToolCallEnd,
)
from vllm_metal_lite.chat_formats.parser import ChatParser
from vllm_metal_lite.chat_formats.tool import Tool

TOOLS = (
    Tool("read", "Read a file.", {
        "type": "object",
        "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["path"],
    }),
    Tool("run", "Run a command.", {
        "type": "object",
        "properties": {
            "cmd": {"type": "string"}, "env": {"type": "object"}, "args": {"type": "array"},
            "dry": {"type": "boolean"}, "scale": {"type": "number"},
            "mode": {"enum": ["fast", "slow"]}, "note": {"type": ["string", "null"]},
            "version": {"const": "5"},
        },
        "required": ["cmd"],
    }),
    Tool("now", "The time."), Tool("function"),
)  # fmt: skip


@dataclass
class Call:
    name: str
    text: str = ""
    is_whole: bool | None = None  # None: never ended

    @property
    def arguments(self) -> Any:
        return json.loads(self.text)


@dataclass
class Said:
    """What an answer came to."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def called(self) -> list[tuple[str, Any]]:
        assert all(call.is_whole for call in self.calls), self.calls
        return [(call.name, call.arguments) for call in self.calls]


def gather(events: Iterable[Event]) -> Said:
    said = Said()
    for event in events:
        if isinstance(event, Text):
            said.text += event.text
        elif isinstance(event, Reasoning):
            said.reasoning += event.text
        elif isinstance(event, ToolCall):
            assert not said.calls or said.calls[-1].is_whole is not None, "calls overlap"
            said.calls.append(Call(event.name))
        elif isinstance(event, Arguments):
            assert event.text
            assert said.calls[-1].is_whole is None, "arguments behind the end of their call"
            said.calls[-1].text += event.text
        elif isinstance(event, ToolCallEnd):
            assert said.calls[-1].is_whole is None, "a call ends twice"
            said.calls[-1].is_whole = event.is_whole
    assert all(call.is_whole is not None for call in said.calls), "a call never ends"
    return said


def parse(
    chat_format: ChatFormat,
    pieces: str | Sequence[str],
    tools: Sequence[Tool] = TOOLS,
    **options: Any,
) -> Said:
    """What the pieces of an answer come to; a string is one piece."""
    parser = ChatParser(chat_format, tools, **options)
    events: list[Event] = []
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        events += parser.feed(piece)
    return gather([*events, *parser.close()])


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The pieces of a text that is cut at places, if it reaches so far."""
    at = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(at)]


def check_splits(chat_format: ChatFormat, text: str, **options: Any) -> Said:
    """Parse a text whole, by characters, and in two pieces at every place: all come to the same."""
    whole = parse(chat_format, text, **options)
    assert parse(chat_format, list(text), **options) == whole
    for at in range(1, len(text)):
        assert parse(chat_format, [text[:at], text[at:]], **options) == whole, at
    return whole


def check_cuts(chat_format: ChatFormat, text: str, **options: Any) -> None:
    """A text that ends anywhere: earlier calls stay, and nothing is added."""
    whole = parse(chat_format, text, **options)
    for at in range(len(text)):
        said = parse(chat_format, list(text[:at]), **options)
        assert len(said.calls) <= len(whole.calls)
        for call, meant in zip(said.calls, whole.calls, strict=False):
            assert call.name == meant.name
            assert meant.text.startswith(call.text)
            assert not call.is_whole or call.text == meant.text
