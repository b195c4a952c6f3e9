"""An answer's text, in pieces of any size, to events; docs/tools.md has the rules.

Whitespace around thoughts and calls comes from the template, and is dropped.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import lru_cache

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.events import Event, Reasoning, Text
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
        # A format's own `read_answer` reads from the reader, and writes to the other three.
        self.reader = Reader()
        self.text = Trimmed(lambda text: emit(Text(text)), hidden)
        self.reasoning = Trimmed(lambda text: emit(Reasoning(text)), hidden)
        self.calls = CallWriter(self.reader, tools, emit, is_held)
        self._reading = (chat_format.read_answer or ChatParser._read)(self)

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece of text."""
        self.reader.rest += text
        next(self._reading, None)
        return self._take()

    def close(self) -> list[Event]:
        """The events at the answer's end."""
        self.reader.is_closed = True
        for _ in self._reading:
            pass
        self.reasoning.at_marker()
        self.text.close()
        return self._take()

    def _take(self) -> list[Event]:
        events = self._events.copy()
        self._events.clear()
        return events

    def _read(self) -> Reading[None]:
        """An answer of text with marked thoughts and calls."""
        reader, thoughts, bare_start = self.reader, self._format.thoughts, self._format.bare_start
        thinks = [thoughts.start] if thoughts and self._may_think else []
        calls = self._format.call_starts if self._has_tools else ()
        if thoughts and self._in_reasoning:
            yield from self._read_thoughts(thoughts.end)
        if self._has_tools and bare_start:
            with suppress(CutShort):  # the answer is only whitespace
                if (yield from reader.follows([bare_start])):
                    self.text.at_marker()
                    yield from self._read_calls("", self.text)
        is_first = True  # no text precedes, but thoughts or calls may
        while True:
            starts: Sequence[str] = () if self._calls_first else calls
            if is_first:
                with suppress(CutShort):
                    first = yield from reader.follows([*thinks, *calls])
                    starts = [first] if first else starts
            marker = yield from reader.pass_until(starts, self.text)
            if marker is None:
                return
            if thoughts and marker in thinks:
                self.text.at_marker()
                yield from self._read_thoughts(thoughts.end)
                is_first = True
            else:
                is_first = yield from self._read_calls(marker, self.text)

    def _read_thoughts(self, end: str) -> Reading[None]:
        self.reasoning.at_marker()
        # A model may make a call before it closes its thoughts, or mention a marker in them.
        calls = self._format.call_starts if self._has_tools and not self.calls.is_held else ()
        while True:
            marker = yield from self.reader.pass_until([end, *calls], self.reasoning)
            if marker is None or marker == end:
                self.text.at_marker()
                return
            yield from self._read_calls(marker, self.reasoning)

    def _read_calls(self, marker: str, out: "Trimmed") -> Reading[bool]:
        """Read one or more calls after their marker; False: there is none.

        out: receives a marker that begins no call.  The text after such a marker is read again,
        because it may hold other markers.
        """
        assert self._format.read_calls is not None, "a format with markers of calls reads them"
        reader, calls, call_ends = self.reader, self.calls, self._format.call_ends
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


class Trimmed:
    """Passes text on, without hidden special tokens and without whitespace around markers.

    Clients join the texts on both sides of a marker.  They are separated by the whitespace before
    the marker; if there is none, by that after it; else by a line break.
    """

    def __init__(self, emit: Callable[[str], None], hidden: Collection[str] = ()) -> None:
        self._emit, self._drop_hidden = emit, _dropper(frozenset(hidden))
        self._has_said = self._after_marker = False
        self._between = ""  # the whitespace before the marker
        self._held = ""  # whitespace, until text follows; then what may become a hidden token

    def __call__(self, text: str) -> None:
        text, begun = self._drop_hidden(self._held + text)
        body = text.rstrip()
        self._held = text[len(body) :] + begun
        self._say(body)

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._after_marker:
            body = text.lstrip()
            space = self._between or text[: -len(body)] or "\n"
            text, self._after_marker = space * self._has_said + body, False
        self._has_said = True
        self._emit(text)

    def at_marker(self) -> None:
        """Thoughts or a call follow, or have just ended."""
        if self._held.strip():  # a token has begun, and does not end
            self._say(self._held)
            self._held = ""
        self._between = (self._between if self._after_marker else "") or self._held
        self._held, self._after_marker = "", True

    def close(self) -> None:
        """The answer has ended."""
        if self._held.strip() or not self._after_marker:
            self._say(self._held)
        self._held = ""


@lru_cache(8)
def _dropper(tokens: frozenset[str]) -> Callable[[str], tuple[str, str]]:
    """A function that splits a text into (the text without `tokens`, a token begun at its end).

    The function must be fast: it runs for each piece of text, and some tokenizers have thousands of
    special tokens.  A token comes in pieces if stop strings hold text back.
    """
    if not tokens:
        return lambda text: (text, "")
    ordered, longest = sorted(tokens), max(map(len, tokens))
    whole = re.compile("|".join(map(re.escape, reversed(ordered))))
    first = re.compile(f"[{re.escape(''.join({token[0] for token in tokens}))}]")

    def drop(text: str) -> tuple[str, str]:
        text = whole.sub("", text)
        for found in first.finditer(text, max(len(text) - longest, 0)):
            end = text[found.start() :]
            at = bisect_left(ordered, end)
            if at < len(ordered) and ordered[at].startswith(end):
                return text[: found.start()], end
        return text, ""

    return drop
