"""Turns an answer's text, in pieces of any size, into events; docs/tools.md has the rules.

Whitespace around thoughts and calls comes from the template, and is dropped.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.events import Event, Reasoning, Text, Trimmed
from vllm_metal_lite.chat_formats.reader import CutShort, Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.tool import Tool

_MOST_AGAIN = 100_000  # characters; a hostile answer would be read again a thousand times


class ChatParser:
    """Parses one answer.

    tools: the request's tools; without any, calls are text.
    hidden: special tokens that are no markers of the format; they are not shown.
    in_reasoning: the prompt ends within thoughts.  may_think: thoughts may begin before any text,
    after other thoughts and after calls; they never begin after text.
    is_held: a grammar holds the calls of the answer after its thoughts.  Then the parser takes as a
    call only text that the grammar takes as one: no call in thoughts, no mistake is corrected.
    calls_first: the answer is calls, or a text that has none.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        tools: Sequence[Tool] = (),
        *,
        hidden: Collection[str] = (),
        in_reasoning: bool = False,
        may_think: bool = True,
        is_held: bool = False,
        calls_first: bool = False,
    ) -> None:
        self._format, self._calls_first = chat_format, calls_first
        self._in_reasoning, self._may_think = in_reasoning, may_think
        self._has_tools, self._events = bool(tools), list[Event]()
        emit = self._events.append
        self._reader = reader = Reader()
        self._text = text = Trimmed(lambda text: emit(Text(text)), hidden)
        self._reasoning = reasoning = Trimmed(lambda text: emit(Reasoning(text)), hidden)
        self._calls = calls = CallWriter(reader, tools, emit, is_held)
        if chat_format.read_answer is not None:
            self._reading = chat_format.read_answer(reader, calls, text, reasoning)
        else:
            self._reading = self._read()

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece of text."""
        self._reader.rest += text
        next(self._reading, None)
        return self._take()

    def close(self) -> list[Event]:
        """The events at the answer's end."""
        self._reader.is_closed = True
        for _ in self._reading:
            pass
        self._reasoning.at_marker()
        self._text.close()
        return self._take()

    def _take(self) -> list[Event]:
        events = self._events.copy()
        self._events.clear()
        return events

    def _read(self) -> Reading[None]:
        """An answer of text with marked thoughts and calls."""
        reader, thoughts, bare_start = self._reader, self._format.thoughts, self._format.bare_start
        thinks = [thoughts.start] if thoughts and self._may_think else []
        calls = self._format.call_starts if self._has_tools else ()
        if thoughts and self._in_reasoning:
            yield from self._read_thoughts(thoughts.end)
        if self._has_tools and bare_start:
            with suppress(CutShort):  # the answer is only whitespace
                if (yield from reader.follows([bare_start])):
                    self._text.at_marker()
                    yield from self._read_calls("", self._text)
        is_first = True  # no text precedes, but thoughts or calls may
        while True:
            starts: Sequence[str] = () if self._calls_first else calls
            if is_first:
                with suppress(CutShort):
                    first = yield from reader.follows([*thinks, *calls])
                    starts = [first] if first else starts
            marker = yield from reader.pass_until(starts, self._text)
            if marker is None:
                return
            if thoughts and marker in thinks:
                self._text.at_marker()
                yield from self._read_thoughts(thoughts.end)
                is_first = True
            else:
                is_first = yield from self._read_calls(marker, self._text)

    def _read_thoughts(self, end: str) -> Reading[None]:
        self._reasoning.at_marker()
        # A model may make a call before it closes its thoughts, or mention a marker in them.
        calls = self._format.call_starts if self._has_tools and not self._calls.is_held else ()
        while True:
            marker = yield from self._reader.pass_until([end, *calls], self._reasoning)
            if marker is None or marker == end:
                self._text.at_marker()
                return
            yield from self._read_calls(marker, self._reasoning)

    def _read_calls(self, marker: str, out: Trimmed) -> Reading[bool]:
        """Read one or more calls after their marker; False: there is none.

        out: receives a marker that begins no call.  The text after such a marker is read again,
        because it may hold other markers.
        """
        assert self._format.read_calls is not None, "a format with markers of calls reads them"
        reader, calls, call_ends = self._reader, self._calls, self._format.call_ends
        reader.recorded = marker
        try:
            yield from calls.guard(self._format.read_calls(reader, calls), call_ends)
            out.at_marker()
            reader.recorded = None
            while (end := (yield from reader.follows(call_ends))) is not None:
                yield from reader.expect(end)  # models double it
        except Malformed as e:
            if calls.is_open:
                reader.take(len(reader.rest))  # a value that has begun
                calls.cut()
                out.at_marker()
            else:
                read, reader.recorded = reader.recorded or "", None
                if isinstance(e, CutShort) and not read:
                    reader.take(len(reader.rest))  # an end marker that has begun
                is_text = read.startswith(marker)  # else calls precede
                out(marker * is_text)
                again = read[len(marker) * is_text :]
                reader.num_again += len(again)
                if reader.num_again > _MOST_AGAIN:
                    out(again)
                else:
                    reader.rest = again + reader.rest
                return not is_text
        reader.recorded = None
        return True
