"""Writes the events of tool calls, for the readers of all formats."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from vllm_metal_lite.chat_formats.events import Arguments, Event, ToolCall, ToolCallEnd
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading, loads
from vllm_metal_lite.chat_formats.tool import Tool

_encode = json.JSONEncoder(ensure_ascii=False).encode


class CallWriter:
    """The calls of an answer.  is_open: a call has begun and not ended."""

    def __init__(
        self, reader: Reader, tools: Sequence[Tool], emit: Callable[[Event], None]
    ) -> None:
        self._reader, self._emit = reader, emit
        self._tools = {tool.name: tool for tool in tools}
        self.is_open = False
        self._parts: list[str] = []  # of the arguments

    def knows(self, name: Any) -> bool:
        """Whether the request has a tool of this name."""
        return isinstance(name, str) and name in self._tools

    def begin(self, name: Any, call_id: str | None = None) -> Tool:
        """A call's name is read.  Raises Malformed for a tool that the request does not have."""
        if not self.knows(name):
            raise Malformed
        self._emit(ToolCall(name, call_id))
        self.is_open, self._parts = True, []
        self._reader.taken = None  # the call is no text any longer
        return self._tools[name]

    @property
    def has_arguments(self) -> bool:
        """Whether the open call's arguments have begun."""
        return bool(self._parts)

    def arguments(self, text: str) -> None:
        """The next piece of the JSON of the arguments."""
        if text:
            self._parts.append(text)
            self._emit(Arguments(text))

    def end(self) -> None:
        """The call's arguments are complete."""
        if not self._parts:
            self.arguments("{}")
        try:
            is_whole = isinstance(loads("".join(self._parts)), dict)
        except Malformed:
            is_whole = False
        self._close(is_whole)

    def cut(self) -> None:
        """The text ended, or went wrong, within the call."""
        if not self._parts:
            self.arguments("{")  # clients take no text for an empty object
        self._close(False)

    def _close(self, is_whole: bool) -> None:
        self._emit(ToolCallEnd(is_whole))
        self.is_open = False
        self._reader.taken = ""


class ObjectWriter:
    """Arguments that a format writes one by one, as one JSON object."""

    def __init__(self, calls: CallWriter) -> None:
        self._calls, self._is_first = calls, True

    def key(self, name: str) -> None:
        self._calls.arguments(f"{'{' if self._is_first else ', '}{_encode(name)}: ")
        self._is_first = False

    def value(self, value: Any) -> None:
        """A whole value."""
        self._calls.arguments(_encode(value))

    def string_start(self) -> None:
        self._calls.arguments('"')

    def string_piece(self, text: str) -> None:
        self._calls.arguments(_encode(text)[1:-1])

    def string_end(self) -> None:
        self._calls.arguments('"')

    def end(self) -> None:
        self._calls.arguments("{}" if self._is_first else "}")
        self._calls.end()


def json_call(
    reader: Reader,
    calls: CallWriter,
    name_key: str = "name",
    argument_keys: Sequence[str] = ("arguments", "parameters"),
) -> Reading[None]:
    """A call as a JSON object with a name and arguments, in any order; other keys are ignored.

    Raises Malformed, CutShort.
    """
    yield from reader.expect("{")
    early: str | None = None  # arguments that came before the name
    done = False
    while (yield from reader.peek()) != "}":
        key = yield from reader.json()
        yield from reader.expect(":")
        if key == name_key and not calls.is_open:
            calls.begin((yield from reader.json()))
            if early is not None:
                calls.arguments(early)
        elif key in argument_keys and not done:
            early, done = (yield from _arguments(reader, calls)), True
        else:
            yield from reader.json()
        if (yield from reader.peek()) == ",":
            reader.take(1)
        elif reader.rest[:1] != "}":
            raise Malformed
    reader.take(1)
    if not calls.is_open:
        raise Malformed
    calls.end()


def _arguments(reader: Reader, calls: CallWriter) -> Reading[str | None]:
    """Pass arguments on; returns them if the name is not known yet."""
    parts: list[str] = []
    if (yield from reader.peek()) == '"':  # JSON within a string
        text = yield from reader.json()
        parts = [str(text)]
    elif calls.is_open:
        yield from reader.json_value(calls.arguments)
        return None
    else:
        yield from reader.json_value(parts.append)
    if calls.is_open:
        calls.arguments("".join(parts))
        return None
    return "".join(parts)
