"""Text for people, as wide as their terminal."""

import os
import re
import textwrap
from typing import TextIO

_NARROWEST = 20

# "Model:     demo: ..." and "/reset     forget ...": wrapped lines align below the text.
_LABEL = re.compile(r"\S+(?: \S+)?(?<![.!?)]) {2,}(?=\S)")
_LONGEST_LABEL = 20


def wrap(text: str, stream: TextIO) -> str:
    """Wrap lines wider than the terminal of `stream`; lines to files stay whole."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # no terminal, or no file at all
        return text
    if not width:
        return text
    return "\n".join(_wrap_line(line, max(width, _NARROWEST)) for line in text.split("\n"))


def _wrap_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    label = _LABEL.match(line)
    hang = label.end() if label and label.end() <= min(_LONGEST_LABEL, width // 2) else 0
    # Paths and commands stay in one piece, to be copied.
    whole = textwrap.TextWrapper(width - hang, break_long_words=False, break_on_hyphens=False)
    rest = whole.wrap(line[hang:])
    return line[:hang] + ("\n" + " " * hang).join(rest)
