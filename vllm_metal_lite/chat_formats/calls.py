"""Writes the events of tool calls, for the readers of all formats."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from vllm_metal_lite.chat_formats.events import Arguments, Event, ToolCall, ToolCallEnd
from vllm_metal_lite.chat_formats.reader import (
    CutShort,
    Malformed,
    Reader,
    Reading,
    loads,
    loads_or,
)
from vllm_metal_lite.chat_formats.tool import Tool

_encode = json.JSONEncoder(ensure_ascii=False).encode


class CallWriter:
    """The calls of an answer.

    is_open: a call has begun and not ended.  is_held: see ChatParser.

    A reader writes the arguments as the text of one JSON object (`arguments`), or one by one (`key`
    and `value`); `names` then has the names so far.
    """

    def __init__(
        self,
        reader: Reader,
        tools: Sequence[Tool],
        emit: Callable[[Event], None],
        is_held: bool = False,
    ) -> None:
        self._reader, self._emit = reader, emit
        self._tools = {tool.name: tool for tool in tools}
        self.is_open, self.is_held = False, is_held
        self.names: list[str] = []
        self._parts: list[str] = []  # pieces of the arguments

    def knows(self, name: Any) -> bool:
        """Whether the request has a tool of this name."""
        return isinstance(name, str) and name in self._tools

    def name(self, *ends: str) -> Reading[tuple[str, str]]:
        """Read the name of a tool of the request, as `Reader.name` does."""
        return self._reader.name(
            *ends, begins=lambda text: any(name.startswith(text) for name in self._tools)
        )

    def begin(self, name: Any) -> Tool:
        """Begin a call of a tool.  Raises Malformed if the request does not have the tool."""
        if not self.knows(name):
            raise Malformed
        self._send(ToolCall(name))
        self.is_open, self.names, self._parts = True, [], []
        return self._tools[name]

    def arguments(self, text: str) -> None:
        """Write the next piece of the arguments' JSON."""
        self._reader.recorded = ""
        if text:
            self._parts.append(text)
            self._send(Arguments(text))

    def key(self, name: str) -> None:
        """Write the name of the next argument.  Raises Malformed if the call has it already."""
        if name in self.names:
            raise Malformed
        self.arguments(f"{', ' if self.names else '{'}{_encode(name)}: ")
        self.names.append(name)

    def value(self, value: Any) -> None:
        """Write a whole value."""
        self.arguments(_encode(value))

    def quote(self) -> None:
        """Write the quote that begins or ends a string."""
        self.arguments('"')

    def string_piece(self, text: str) -> None:
        self.arguments(_encode(text)[1:-1])

    def end(self) -> None:
        """End the call, whose arguments are complete."""
        if self.names or not self._parts:
            self.arguments("}" if self.names else "{}")
        self._send(ToolCallEnd(isinstance(loads_or(None, "".join(self._parts)), dict)))
        self.is_open = False

    def cut(self) -> None:
        """End the call, within which the text ended or went wrong."""
        if not self._parts:
            self.arguments("{")  # clients read an empty text as an empty object
        self._send(ToolCallEnd(False))
        self.is_open = False

    def _send(self, event: Event) -> None:
        self._emit(event)
        self._reader.recorded = ""  # the text read so far belongs to the call

    def guard(self, reading: Reading[None], ends: Sequence[str]) -> Reading[None]:
        """Read a call.  If a call is malformed after its name, the rest up to one of `ends` becomes
        its arguments.

        Raises CutShort, and Malformed if no call is open.
        """
        try:
            yield from reading
            return
        except CutShort:
            raise
        except (Malformed, RecursionError):  # values may be nested too deeply
            if not self.is_open:
                raise
        taken = self._reader.recorded or ""
        self.arguments(taken.lstrip())
        space = taken[len(taken.rstrip()) :]  # may contain the end, if that is a line break
        if ends and not any(end in space for end in ends):
            yield from self._reader.pass_until(ends, self.arguments)
        self.cut()

    def section(
        self, read: Callable[[], Reading[None]], start: str, call_end: str, end: str
    ) -> Reading[None]:
        """Read calls that begin with `start`; `read` reads one call after `start`.  If a call is
        malformed, reading resumes after `call_end`.  A model may end its answer without `end`, the
        mark after all calls; "": there is one call."""
        reader = self._reader
        if reader.recorded != start:  # the marker that led here
            yield from reader.expect(start)
        yield from self.guard(read(), (call_end, end) if end else (call_end,))
        while end and (yield from reader.has(start)):
            yield from self.guard(read(), (call_end, end))
        if end:
            yield from reader.has(end)


def json_list(reader: Reader, calls: CallWriter, name_key: str = "name") -> Reading[None]:
    """Read calls from a JSON list of objects, each as `json_call` does."""
    yield from reader.expect("[")
    while (yield from json_call(reader, calls, name_key, end="]", between=",")):
        pass
    yield from reader.expect("]")


def json_call(
    reader: Reader, calls: CallWriter, name_key: str = "name", end: str = "", between: str = ""
) -> Reading[bool]:
    """Read a call from a JSON object with a name and arguments in any order, among other keys.

    Reads `between` and returns True if another call follows.  end: the text after the object.  The
    object's last bracket may be missing or doubled.  Raises Malformed, CutShort.
    """
    yield from reader.expect("{")
    early: list[str] = []  # arguments that came before the name
    done = False
    while (yield from reader.peek()) != "}":
        key = yield from reader.json()
        yield from reader.expect(":")
        if key == name_key and not calls.is_open:
            calls.begin((yield from reader.json()))
            calls.arguments("".join(early))
        elif key in ("arguments", "parameters") and not done:
            pass_on = calls.arguments if calls.is_open else early.append
            yield from json_arguments(reader, pass_on, "}", end or "}")
            done = True
        else:
            yield from reader.json()
        if not (yield from reader.has(",")) and reader.rest[:1] != "}":
            if done and end and (yield from reader.follows((end,))):
                break
            raise Malformed if reader.rest else CutShort
    if not calls.is_open:
        raise Malformed
    calls.end()
    while (yield from reader.has("}")):
        pass
    more = between != "" and (yield from reader.has(between))
    reader.recorded = ""  # if the rest is malformed, only the rest becomes text
    return more


def json_arguments(reader: Reader, pass_on: Callable[[str], None], *ends: str) -> Reading[None]:
    """Pass arguments on: an object piece by piece, or the object that a string contains.

    null, [], "", and no value before one of `ends`, become an empty object.  Raises Malformed,
    CutShort.
    """
    pass_on("")  # the text before the arguments is no part of them
    if (yield from reader.peek()) == "{":
        yield from reader.json_value(pass_on)
        return
    value: object = None
    if not (yield from reader.follows(ends)):
        value = yield from reader.json()
    if isinstance(value, str):
        value = loads(value or "null")
    pass_on(_encode({} if value in (None, []) else value))
