"""Reads arguments that a format writes as plain text; their types are those of the tool's schema.

    <parameter=limit>3</parameter>           the number 3, or "3" if the schema has a string
    <parameter=html></parameter></p>...      a value may hold the text that ends values

So the question is where a value ends: `_held_end` answers where a grammar holds the answer,
`_free_end` where a model may write anything.  typed_values.py makes a value of the text.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.schema import JSON_TYPES
from vllm_metal_lite.chat_formats.tool import Tool
from vllm_metal_lite.chat_formats.typed_values import is_json, value_of

_JSON_START = re.compile(r"\s*[{\[](?!\s*')")  # Python's strings may have other quotes
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


@dataclass(frozen=True)
class Tags:
    """Tags around values.

    end: the tag after a value.  close: ends the call; without tag_start, ends the argument.
    tag_start: the start of every argument's tag; "" for a value between marks of its own.
    tag: the whole tag, with {} for the argument's name.  outer: any of them may follow `close`.
    newlines: the format adds a line break before and after a string.
    """

    end: str
    close: str
    tag_start: str = ""
    tag: str = ""
    outer: tuple[str, ...] = ()
    newlines: bool = False

    @property
    def marks(self) -> list[str]:
        """Where a value may end."""
        marks = {mark for mark in (self.end, self.tag_start, self.close) if mark}
        return sorted(m for m in marks if not any(m.startswith(o) for o in marks - {m}))


def read_typed(
    reader: Reader, calls: CallWriter, tool: Tool, name: str, tags: Tags, is_string: bool | None
) -> Reading[None]:
    """Read the argument `name` and its end.  Strings are passed on as they come.

    is_string: None if the tool's schema decides.  Raises Malformed, CutShort.
    """
    calls.key(name)
    types = tool.types.get(name, {"string"})
    if is_string is not None:
        types = {"string"} if is_string else {*JSON_TYPES.values()} - {"string"}
    others = [tags.tag.format(n) for n in tool.types if tags.tag and n not in calls.names]
    value = partial(_value, reader, tags, others, types, is_held=calls.is_held)
    if types != {"string"}:
        text, _ = yield from value(lambda text: None)
        bare = text.removeprefix("\n").removesuffix("\n") if tags.newlines else text
        named = tool.named.get(name, {})
        calls.value(named[bare] if bare in named else value_of(bare, types))
        return
    if tags.newlines:
        yield from reader.begins("\n")
    held = ""  # a line break that may be the last

    def pass_on(text: str) -> None:
        nonlocal held
        text, held = held + text, ""
        if text.endswith("\n"):
            text, held = text[:-1], "\n"
        if text:
            calls.string_piece(text)

    calls.quote()
    _, has_end = yield from value(pass_on)
    if has_end and not tags.newlines:
        calls.string_piece(held)
    calls.quote()


def _value(
    reader: Reader,
    tags: Tags,
    others: Sequence[str],
    types: Collection[str],
    pass_on: Callable[[str], None],
    *,
    is_held: bool,
) -> Reading[tuple[str, bool]]:
    """Read the text of a value and its end; also returns whether the end was written.

    others: the tags of arguments that may follow.  is_held: a grammar holds the answer.
    """
    parts: list[str] = []

    def keep(text: str) -> None:
        parts.append(text)
        pass_on(text)

    marks = [tags.end] if is_held and tags.tag_start else tags.marks
    while True:
        mark = yield from reader.before(marks, keep)
        text, end = "".join(parts), None
        if not _ends_in_string(text, types):
            if is_held:
                end = yield from _held_end(reader, tags, mark)
            if end is None:
                is_whole = types != {"string"} and is_json(text)
                end = yield from _free_end(reader, tags, others, text, is_whole=is_whole)
        if end is not None:
            reader.take(len(end))
            return text, is_held or end != ""
        keep(reader.take(1))  # the mark is part of the value


def _held_end(reader: Reader, tags: Tags, mark: str) -> Reading[str | None]:
    """The end of the value at a mark, as the grammar has it; None: the grammar has no end here."""
    if tags.tag_start:
        return mark
    if mark == tags.close:
        return ""
    return mark if (yield from reader.follows([tags.close], len(mark))) else None


def _free_end(
    reader: Reader, tags: Tags, others: Sequence[str], text: str, *, is_whole: bool
) -> Reading[str | None]:
    """The end of the value `text` at a mark, corrected where models go wrong: one end or more, ""
    if the end was forgotten.  None: the value continues.

    A value whose end was forgotten ends at the tag of another argument; at the end of the call only
    if the value is whole JSON (is_whole), or if a tag of `outer` follows.
    """
    found = yield from reader.follows([tags.end, *others, tags.close])
    if found is None:
        return None
    if found == tags.end:
        ends, is_last = yield from _ends(reader, tags)
        if is_last and not (ends.count(tags.end) > 1 and _is_open(text, tags.end)):
            return ends  # some models double them
        return tags.end if is_whole else None
    is_over = is_whole or found in others
    if not (is_over or (yield from reader.follows(tags.outer, len(found)))):
        return None
    if any(end in text for end in (tags.end, tags.close, *tags.outer)):
        raise Malformed  # the value ended before
    return ""


def _ends(reader: Reader, tags: Tags) -> Reading[tuple[str, bool]]:
    """The ends in a row, and whether another argument or the end of the call follows them.  If not,
    the ends are part of the value."""
    length, marks = 0, list(filter(None, (tags.end, tags.tag_start, tags.close, *tags.outer)))
    while (found := (yield from reader.follows(marks, length))) == tags.end:
        length = reader.rest.index(found, length) + len(found)
    return reader.rest[:length], found is not None


def _is_open(text: str, end: str) -> bool:
    """Whether a tag that `end` closes is open at the end of a text."""
    return text.count(end.replace("</", "<", 1).rstrip(">")) > text.count(end)


def _ends_in_string(text: str, types: Collection[str]) -> bool:
    """Whether a text begins a JSON object or list, and ends within a string of it.  A value that
    may be a string is text: its quotes mean nothing."""
    is_text = not types or "string" in types
    return not is_text and _JSON_START.match(text) is not None and '"' in _STRING.sub("", text)
