"""The input of a freeform tool, read from the JSON arguments that a model writes."""

import json
import re
from typing import Any

PARAMETER = "input"

_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# A unit is decoded at once: plain characters, or one escape.
_UNIT = re.compile(
    r'[^"\\]+'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a surrogate pair
    r"|\\u[0-9a-fA-F]{4}"
    r'|\\["\\/bfnrt]'
)
_LEN_PAIR = len(r"\ud83d\ude00")


class FreeformInput:
    """Takes `{"input": "..."}` in pieces of any size, and returns the text as it comes.

    Arguments of another form are kept until their end.  An object with one string then becomes that
    string; anything else is returned unchanged.
    """

    def __init__(self) -> None:
        self._raw = ""  # not yet given
        self._begun = self._ended = False

    def feed(self, piece: str) -> str:
        """The text that is new."""
        if self._ended:
            return ""
        self._raw += piece
        if not self._begun:
            start = _START.match(self._raw)
            if start is None:
                return ""
            self._begun, self._raw = True, self._raw[start.end() :]
        return self._decoded()

    def close(self) -> str:
        """What is left at the end of the arguments."""
        if self._begun or not self._raw:
            return ""
        try:
            arguments: Any = json.loads(self._raw)
        except (ValueError, RecursionError):
            return self._raw
        values = list(arguments.values()) if isinstance(arguments, dict) else [arguments]
        if isinstance(arguments, dict) and PARAMETER in arguments:
            values = [arguments[PARAMETER]]
        return values[0] if len(values) == 1 and isinstance(values[0], str) else self._raw

    def _decoded(self) -> str:
        """Decode whole units; the rest waits."""
        raw, at, text = self._raw, 0, []
        while at < len(raw):
            if raw[at] == '"':
                self._ended = True
                break
            left = raw[at:]
            if left == "\\" or (
                left.startswith("\\u") and len(left) < _LEN_PAIR and '"' not in left
            ):
                break
            unit = _UNIT.match(raw, at)
            piece = unit[0] if unit else raw[at]  # JSON does not have every escape
            text.append(json.loads(f'"{piece}"') if unit and piece[0] == "\\" else piece)
            at += len(piece)
        self._raw = raw[at:]
        return "".join(text)
