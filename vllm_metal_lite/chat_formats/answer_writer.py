"""The output of readers of answers: text, thoughts and calls."""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.events import Event, Reasoning, Text
from vllm_metal_lite.chat_formats.reader import Reader
from vllm_metal_lite.chat_formats.tool import Tool


class AnswerWriter:
    """The output of a reader.  hidden: special tokens to drop."""

    def __init__(
        self,
        reader: Reader,
        tools: Sequence[Tool],
        emit: Callable[[Event], None],
        hidden: Collection[str] = (),
    ) -> None:
        self.has_tools = bool(tools)
        self.text = Trimmed(lambda text: emit(Text(text)), hidden)
        self.reasoning = Trimmed(lambda text: emit(Reasoning(text)), hidden)
        self.calls = CallWriter(reader, tools, emit)


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
