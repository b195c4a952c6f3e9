"""The chat's terminal: answers on stdout, notices on stderr, lines from stdin."""

import sys
from io import TextIOWrapper
from types import ModuleType

from vllm_metal_lite import envs
from vllm_metal_lite.cli import log

_PROMPT, _MORE = ">>> ", "... "
_DIM = "\x1b[2m{}\x1b[0m"

# A model's output must not control the terminal, so control characters become visible.
_CONTROLS = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"}
_CONTROLS |= dict.fromkeys(range(127, 160), "�")


class Terminal:
    """Standard input, output and error of a chat.

    interactive: a person types; otherwise stdin is a pipe or a file, and no notices are shown.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._dim = _DIM if sys.stderr.isatty() and not envs.no_color() else "{}"
        self._filter = sys.stdout.isatty()
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="replace")
        self._readline = _readline() if self.interactive else None

    def write(self, text: str) -> None:
        """Write a part of an answer to stdout."""
        if self._filter:
            text = text.translate(_CONTROLS)
        sys.stdout.write(text)
        sys.stdout.flush()

    def notice(self, text: str) -> None:
        """Show something that the user should know, on stderr."""
        if self.interactive:
            log.say(text)

    def status(self, text: str) -> None:
        """Show something less important than a notice, in dim text."""
        if self.interactive:
            log.say(text, self._dim)

    def read_all(self) -> str:
        """Read all of stdin as one message."""
        return sys.stdin.read().strip()

    def read_message(self) -> str | None:
        """Read one message; None at the end of the input.

        A backslash at the end of a line continues the message in the next line.

        Pasted text keeps its line breaks within one message, if readline detects pastes.

        Ctrl-C drops the typed text; with nothing typed, it raises KeyboardInterrupt.
        """
        lines: list[str] = []
        while True:
            try:
                line = _ask(_MORE if lines else _PROMPT)
            except EOFError:
                return "\n".join(lines) if lines else None
            except UnicodeDecodeError:
                self.notice("error: that is not text in this terminal's encoding")
                continue
            except KeyboardInterrupt:
                if not lines and not (self._readline and self._readline.get_line_buffer()):
                    raise
                self.notice("")
                lines.clear()
                continue
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])


def _ask(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # stdout is for answers only
    return input()


def _readline() -> ModuleType | None:
    """readline, whose import gives `input` line editing and a history; some Pythons lack it.

    Python turns bracketed paste off.  libedit, readline's replacement on many Macs, has none.
    """
    try:
        import readline
    except ImportError:
        return None
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")
    return readline
