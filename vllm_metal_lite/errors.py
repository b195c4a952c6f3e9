"""Errors a user can cause.  Each message is one line that names the value and the limit."""

from collections.abc import Callable
from traceback import walk_tb

# The cause in each message about a model whose numbers are NaN or infinite.
NOT_FINITE = "its weights are damaged, or its numbers do not fit its dtype"


class Option(str):
    """The name of an option or a parameter, in a message."""


class MetalLiteError(ValueError):
    """Base of every error that a user's input can cause; the CLI prints it without a traceback.

    The message is made of parts.  Each front end spells the `Option`s among them in its own way:
    `kv_bits` is the name in Python and in JSON, `--kv-bits` on the command line.  Characters that
    cannot be printed become spaces, so the message is one line whatever it quotes.
    """

    def __init__(self, *parts: str) -> None:
        super().__init__(_printable("".join(parts)))
        self.parts = parts

    @property
    def option(self) -> Option | None:
        """The first option that the message names."""
        return next((part for part in self.parts if isinstance(part, Option)), None)

    def spelled(self, spell: Callable[[str], str]) -> str:
        """The message, with its options spelled by `spell`."""
        parts = (spell(part) if isinstance(part, Option) else part for part in self.parts)
        return _printable("".join(parts))


class ConfigError(MetalLiteError):
    """An option of the engine is out of range."""


class SamplingError(MetalLiteError):
    """A sampling parameter is out of range."""


class RequestError(MetalLiteError):
    """A request that can never be served: refused when it is added; others continue."""


class BusyError(MetalLiteError):
    """Other requests use all of what this one needs, so a later try may succeed."""


class PromptTooLong(RequestError):
    """A prompt that does not fit.  num_tokens: its length, an estimate if it is very long."""

    def __init__(self, num_tokens: int, most: int) -> None:
        super().__init__(f"the prompt has about {num_tokens} tokens; the limit is {most}")
        self.num_tokens = num_tokens


class ModelLoadError(MetalLiteError):
    """A model cannot be found, read, or run by this package."""


class RemoteCodeError(ModelLoadError):
    """A model needs Python code of its own, and the user has not allowed it."""


class OutOfMemoryError(MetalLiteError):
    """The model or its KV store does not fit the memory that may be used."""


def is_our_fault(error: Exception) -> bool:
    """Whether this package's own code is at fault: MLX does not raise errors of this type, and the
    error was not raised in a model's code.  If the error has a cause, the cause decides."""
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(error, (TypeError, ValueError, RuntimeError)):
        return False
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "").startswith("vllm_metal_lite.")


def our_fault(error: Exception) -> str:
    """One line about an error of this package's own code: its type, its place and its words."""
    *_, (frame, line) = walk_tb(error.__traceback__)
    place = f"{frame.f_globals.get('__name__', '?')}, line {line}"
    return f"a fault of vllm-metal-lite: {type(error).__name__} in {place}: {one_line(error)}"


def install(extra: str) -> str:
    """The command that installs an extra of this package, which is not on PyPI."""
    return f'pip install -e ".[{extra}]" (in a clone of the repository)'


def one_line(e: BaseException) -> str:
    """The text of an exception in one line, or its type if the text is empty."""
    text = f"no key {e}" if isinstance(e, KeyError) else str(e)
    return shorten(" ".join(text.split()) or type(e).__name__, 300)


def size_text(num_bytes: float, digits: int = 1) -> str:
    """A number of bytes in GiB or MiB.  digits: the decimal places of GiB."""
    gib = num_bytes / 2**30
    return f"{gib:.{digits}f} GiB" if gib >= 1 else f"{num_bytes / 2**20:.1f} MiB"


def show(value: object) -> str:
    """A value as a message quotes it: its repr, cut if it is long."""
    try:
        return shorten(repr(value))
    except Exception:  # an integer of too many digits, a broken __repr__
        return f"a value of type {type(value).__name__}"


def shorten(text: str, most: int = 100) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
