"""The entry point `vllm-metal-lite`: parses the command line, runs a command, sets the exit code.

Exit codes: 0 success, 1 an error (one line on stderr) or a piped answer cut by the context limit,
2 an invalid command line, 130 Ctrl-C, 141 the reader of our output closed the pipe.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from vllm_metal_lite.cli import log, options
from vllm_metal_lite.cli.commands import make_parser
from vllm_metal_lite.errors import MetalLiteError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    _open_closed_streams()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        try:
            args = make_parser().parse_args(argv)
            # Imported late, so that `--help` and errors in flags are instant.
            with log.shown():
                code = import_module(f"vllm_metal_lite.cli.{args.command}").run(args)
        finally:
            sys.stdout.flush()
    except options.UsageError as e:
        return _fail(str(e), 2)
    except MetalLiteError as e:
        return _fail(e.spelled(options.engine_flag), 1)
    except MemoryError as e:  # numpy's, for an absurd option
        return _fail(f"out of memory: {e}", 1)
    except BrokenPipeError:
        _discard_output()
        return 141
    except OSError as e:  # a full disk, a closed terminal
        _discard_output()
        return _fail(f"{e.filename}: {e.strerror}" if e.filename else e.strerror or str(e), 1)
    except KeyboardInterrupt:
        return 130
    return code


def _fail(message: str, code: int) -> int:
    with suppress(OSError):  # stderr is closed
        log.say("error: " + message.replace("\n", " "))
    return code


def _open_closed_streams() -> None:
    """Replace closed standard streams (`>&-`), which are None in Python, by the null device."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _discard_output() -> None:
    """Discard buffered output: it has no reader, and Python would complain on exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
