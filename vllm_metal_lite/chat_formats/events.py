"""Events of a parsed answer, and the writer of its texts."""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import NamedTuple


class Text(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Thoughts."""

    text: str


class ToolCall(NamedTuple):
    """A call begins.  Ids that models write are left out, because they repeat."""

    name: str


class Arguments(NamedTuple):
    """A piece of the arguments of the call that began last: together one JSON object."""

    text: str


class ToolCallEnd(NamedTuple):
    """A call ends.  is_whole: False if it was cut short, or its arguments are no JSON object."""

    is_whole: bool = True


Event = Text | Reasoning | ToolCall | Arguments | ToolCallEnd


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
        """End the answer, and emit the text that was held back."""
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
