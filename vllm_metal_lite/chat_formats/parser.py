"""An answer's text, in pieces of any size, to events; docs/tools.md has the rules.

Whitespace around thoughts and calls comes from the template, and is dropped.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress

from vllm_metal_lite.chat_formats.answer_writer import AnswerWriter, Trimmed
from vllm_metal_lite.chat_formats.chat_format import AnswerRules, ChatFormat
from vllm_metal_lite.chat_formats.events import Event
from vllm_metal_lite.chat_formats.reader import CutShort, Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.tool import Tool

_MOST_AGAIN = 100_000  # characters; a hostile answer would be read again a thousand times


class ChatParser:
    """Parses one answer.

    tools: of the request; without any, calls are text.  hidden: special tokens that are no markers
    of the format; they are not shown.  rules: see AnswerRules.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        tools: Sequence[Tool] = (),
        *,
        hidden: Collection[str] = (),
        **rules: bool,
    ) -> None:
        self._reader = Reader()
        self._events: list[Event] = []
        self._writer = AnswerWriter(self._reader, tools, self._events.append, hidden)
        answer_rules = AnswerRules(**rules)
        self._writer.calls.is_held = answer_rules.is_held
        read = chat_format.read_answer or read_answer
        self._reading = read(self._reader, self._writer, chat_format, answer_rules)

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
        self._writer.reasoning.at_marker()
        self._writer.text.close()
        return self._take()

    def _take(self) -> list[Event]:
        events = self._events.copy()
        self._events.clear()
        return events


def read_answer(
    reader: Reader, writer: AnswerWriter, chat_format: ChatFormat, rules: AnswerRules
) -> Reading[None]:
    """An answer of text with marked thoughts and calls."""
    thoughts = chat_format.thoughts
    thinks = [thoughts.start] if thoughts and rules.may_think else []
    calls = chat_format.call_starts if writer.has_tools else ()
    if thoughts and rules.in_reasoning:
        yield from _thoughts(reader, writer, chat_format, thoughts.end)
    if writer.has_tools and chat_format.bare_start:
        with suppress(CutShort):  # the answer is only whitespace
            if (yield from reader.follows([chat_format.bare_start])):
                writer.text.at_marker()
                yield from _calls(reader, writer, chat_format, "", writer.text)
    is_first = True  # no text precedes, but thoughts or calls may
    while True:
        starts: Sequence[str] = () if rules.calls_first else calls
        if is_first:
            with suppress(CutShort):
                first = yield from reader.follows([*thinks, *calls])
                starts = [first] if first else starts
        marker = yield from reader.pass_until(starts, writer.text)
        if marker is None:
            return
        if thoughts and marker in thinks:
            writer.text.at_marker()
            yield from _thoughts(reader, writer, chat_format, thoughts.end)
            is_first = True
        else:
            is_first = yield from _calls(reader, writer, chat_format, marker, writer.text)


def _thoughts(
    reader: Reader, writer: AnswerWriter, chat_format: ChatFormat, end: str
) -> Reading[None]:
    writer.reasoning.at_marker()
    # A model may make a call before it closes its thoughts, or mention a marker in them.
    calls = chat_format.call_starts if writer.has_tools and not writer.calls.is_held else ()
    while True:
        marker = yield from reader.pass_until([end, *calls], writer.reasoning)
        if marker is None or marker == end:
            writer.text.at_marker()
            return
        yield from _calls(reader, writer, chat_format, marker, writer.reasoning)


def _calls(
    reader: Reader, writer: AnswerWriter, chat_format: ChatFormat, marker: str, out: Trimmed
) -> Reading[bool]:
    """Read one or more calls after their marker; False: there is none.

    out: receives a marker of no call.  The text after such a marker is read again, because it may
    hold other markers.
    """
    assert chat_format.read_calls is not None, "a format with markers of calls reads them"
    calls = writer.calls
    reader.recorded = marker
    try:
        reading = chat_format.read_calls(reader, calls)
        yield from calls.guard(reading, chat_format.call_ends)
        out.at_marker()
        reader.recorded = None
        while (end := (yield from reader.follows(chat_format.call_ends))) is not None:
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
