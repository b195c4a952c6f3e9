"""The input of a freeform tool, read from the JSON arguments that a model writes."""

import json
import re
from typing import Any

PARAMETER = "input"

_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# A unit is decoded at once: plain characters, or one escape.
_UNIT = re.compile(
    r'(?P<end>")'
    r'|(?P<begun>\\(?:u[^"]{0,9})?\Z)'  # an escape that may grow, at most to a surrogate pair
    r"|(?P<escape>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r'|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt])'
    r'|[^"\\]+|\\'  # JSON does not have every escape
)


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
        """The rest, at the end of the arguments."""
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
        at, text = 0, []
        for unit in _UNIT.finditer(self._raw):
            self._ended = unit["end"] is not None
            if self._ended or unit["begun"] is not None:
                break
            text.append(json.loads(f'"{unit[0]}"') if unit["escape"] else unit[0])
            at = unit.end()
        self._raw = self._raw[at:]
        return "".join(text)
