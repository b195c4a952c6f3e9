"""Text that arrives in pieces, read by generators that are written as if they had the whole text.

A generator yields where it needs more text, and calls another one with `yield from`.
"""

import json
import re
from collections.abc import Callable, Collection, Generator, Sequence
from functools import lru_cache
from math import isfinite
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

_SPACE = " \t\r\n"
_AFTER_SCALAR = re.compile(r"[^\w+.-]|_")  # after a number, true, false or null


def _finite(text: str) -> float:
    """A number of JSON: neither NaN nor an infinity, which Python's decoder takes."""
    if not isfinite(value := float(text)):
        raise ValueError(text)
    return value


_DECODER = json.JSONDecoder(
    strict=False, parse_float=_finite, parse_constant=_finite
)  # models write line breaks into strings


class Malformed(Exception):
    """The text is not in the format."""


class CutShort(Malformed):
    """The text ends too early."""


class Reader:
    """rest: text that has arrived and is not read yet.  recorded: text read since a caller set it;
    None: the reader does not record.  num_again: characters that were read and put back."""

    def __init__(self) -> None:
        self.rest = ""
        self.recorded: str | None = None
        self.is_closed = False
        self.num_again = 0

    def take(self, num_characters: int) -> str:
        """Read characters that have arrived."""
        text, self.rest = self.rest[:num_characters], self.rest[num_characters:]
        if self.recorded is not None:
            self.recorded += text
        return text

    def more(self) -> Reading[bool]:
        """Wait for more text; False at the end."""
        if self.is_closed:
            return False
        yield
        return True

    def need(self) -> Reading[None]:
        """Wait for more text.  Raises CutShort at the end."""
        if not (yield from self.more()):
            raise CutShort

    def pass_until(
        self, markers: Sequence[str], pass_on: Callable[[str], None]
    ) -> Reading[str | None]:
        """Pass text on as it comes, up to the first of `markers`; reads and returns the marker.

        None: the text ended without a marker, and all of it was passed on.
        """
        try:
            marker = yield from self.before(markers, pass_on)
        except CutShort:
            pass_on(self.take(len(self.rest)))
            return None
        return self.take(len(marker))

    def before(self, markers: Sequence[str], pass_on: Callable[[str], None]) -> Reading[str]:
        """Pass text on up to the first of `markers`; returns the marker without reading it.

        Raises CutShort at the end of the text; a marker that has begun there is not passed on.
        """
        search = _search(tuple(markers))
        while True:
            found = search(self.rest)
            pass_on(self.take(found.start() if found else len(self.rest)))
            if found and found["marker"]:
                return found["marker"]
            yield from self.need()

    def until(self, marker: str) -> Reading[str]:
        """Read the text before a marker, and the marker; returns the text.  Raises CutShort."""
        parts: list[str] = []
        yield from self.before([marker], parts.append)
        self.take(len(marker))
        return "".join(parts)

    def name(self, *ends: str, begins: Callable[[str], bool] = bool) -> Reading[tuple[str, str]]:
        """Read the name before the first of `ends`, and that end.

        Raises Malformed if another tag comes first: the model may have forgotten an end; and at
        once if the text continues in a second line, or if `begins` knows no name that begins so.
        """
        name = ""

        def keep(text: str) -> None:
            nonlocal name
            name += text
            if (said := name.strip()) and ("\n" in said or not begins(said)):
                raise Malformed

        yield from self.before(["<", *(end for end in ends if end[0] != "<")], keep)
        end = yield from self.follows(ends)
        name = name.strip()
        if end is None or not name:
            raise Malformed
        self.take(len(end))
        return name, end

    def skip_space(self) -> Reading[None]:
        """Read whitespace; wait for more text while there is only whitespace."""
        while True:
            self.take(len(self.rest) - len(self.rest.lstrip(_SPACE)))
            if self.rest or not (yield from self.more()):
                return

    def peek(self) -> Reading[str]:
        """Read whitespace; returns the next character without reading it, "" at the end."""
        yield from self.skip_space()
        return self.rest[:1]

    def has(self, text: str) -> Reading[bool]:
        """As `begins`, after whitespace, which is read even if the text does not follow."""
        yield from self.skip_space()
        return (yield from self.begins(text))

    def begins(self, text: str) -> Reading[bool]:
        """Whether the rest begins with `text`, which is then read.  Raises CutShort if the answer
        ends within `text`."""
        while len(self.rest) < len(text) and text.startswith(self.rest):
            if not (yield from self.more()):
                if self.rest:
                    raise CutShort
                break
        found = self.rest.startswith(text)
        if found:
            self.take(len(text))
        return found

    def follows(self, texts: Sequence[str], skip: int = 0) -> Reading[str | None]:
        """Which of `texts` follows after `skip` characters and whitespace; reads nothing.

        Raises CutShort if the answer ends before this is clear.
        """
        while True:
            ahead = self.rest[skip:].lstrip(_SPACE)
            for text in texts:
                if ahead.startswith(text):
                    return text
            if not any(text.startswith(ahead) for text in texts):
                return None
            yield from self.need()

    def expect(self, text: str) -> Reading[None]:
        """Read whitespace and `text`.  Raises Malformed."""
        if not (yield from self.has(text)):
            raise Malformed if self.rest else CutShort

    def json_value(self, pass_on: Callable[[str], None]) -> Reading[None]:
        """Pass a JSON value on as it comes, up to its end.

        Control characters in strings are escaped, because models write line breaks there.  Raises
        Malformed if no value begins here, and CutShort.
        """
        if not (yield from self.peek()):
            raise CutShort
        if self.rest[0] not in '{["':
            while not (after := _AFTER_SCALAR.search(self.rest)):
                yield from self.need()
            if not after.start():
                raise Malformed
            pass_on(self.take(after.start()))
            return
        depth, in_string, escaped = 0, False, False
        while True:
            start = 0  # the text from here on is not passed on yet
            for i, character in enumerate(self.rest):
                if in_string and character < " ":
                    # A backslash before a line break is part of the text, as in shell commands.
                    pass_on(self.rest[start:i] + "\\" * escaped + json.dumps(character)[1:-1])
                    start, escaped = i + 1, False
                elif escaped:
                    escaped = False
                elif in_string:
                    escaped, in_string = character == "\\", character != '"'
                elif character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                if depth == 0 and not in_string:
                    pass_on(self.take(i + 1)[start:])
                    return
            pass_on(self.take(len(self.rest))[start:])
            yield from self.need()

    def json(self) -> Reading[object]:
        """Read a whole JSON value.  Raises Malformed, CutShort."""
        parts: list[str] = []
        yield from self.json_value(parts.append)
        return loads("".join(parts))


def loads(text: str) -> object:
    """A JSON value; line breaks may stand in strings.  Raises Malformed."""
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        raise Malformed from None
    if text[end:].strip():
        raise Malformed
    return value


def loads_or(default: object, text: str) -> object:
    """As `loads`, but a text that is no JSON value gives `default`."""
    try:
        return loads(text)
    except Malformed:
        return default


@lru_cache(256)
def _search(markers: tuple[str, ...]) -> Callable[[str], re.Match[str] | None]:
    """Finds the first marker (its group is "marker"), or the beginning of one at the text's end.

    Runs once for each token, so it must be quick.
    """
    if not markers:
        return lambda text: None
    begun = {marker[:length] for marker in markers for length in range(1, len(marker))}
    whole, begun_at_end = _any_of(markers), rf"(?:{_any_of(begun)})\Z"
    return re.compile(rf"(?P<marker>{whole})|{begun_at_end}").search


def _any_of(texts: Collection[str]) -> str:
    """A pattern that finds the longest of the texts."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
