"""Opens, checks and writes files; a bad name is refused before long work."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from vllm_metal_lite.cli.options import UsageError
from vllm_metal_lite.errors import MetalLiteError, one_line, shorten


def open_input(name: str) -> BinaryIO:
    """Open the input ("-": stdin); UsageError if it cannot be read."""
    try:
        # A separate file object: a thread must not hold sys.stdin when Python exits.
        return open(0 if name == "-" else name, "rb", closefd=name != "-")
    except (OSError, ValueError) as e:
        raise UsageError(_why_not(name, e)) from None


def check_output(name: str, source: BinaryIO) -> None:
    """UsageError if the output ("-": stdout) cannot be written, or is the input."""
    if name == "-":
        return
    check_writable(name, replaces=True)
    if Path(name).is_file() and os.path.samestat(os.stat(name), os.fstat(source.fileno())):
        raise UsageError(f"{name} is the input: write the output to another file")


def check_writable(name: str, *, replaces: bool) -> None:
    """UsageError if a file cannot be made.

    replaces: the file may exist.  A device or a pipe, such as /dev/stdout, always may.
    """
    try:
        if not _is_special(name):
            existed = Path(name).exists()
            open(name, "ab" if replaces else "xb").close()
            if not existed:
                Path(name).resolve().unlink()  # not the link to it
    except (OSError, ValueError) as e:
        raise UsageError(_why_not(name, e)) from None


def write_json(name: str, value: Any) -> None:
    """Write a value to a new file; MetalLiteError, with the reason, if that is impossible."""
    try:
        with open(name, "w" if _is_special(name) else "x", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2) + "\n")
    except BrokenPipeError:
        raise
    except OSError as e:
        raise MetalLiteError(_why_not(name, e)) from None


def _is_special(name: str) -> bool:
    path = Path(name)
    return path.exists() and not (path.is_file() or path.is_dir())


def _why_not(name: str, e: OSError | ValueError) -> str:
    """Why a file cannot be used; ValueError: the name is not valid."""
    reason = getattr(e, "strerror", None) or one_line(e)
    if isinstance(e, FileExistsError):
        reason = "it exists, and is not overwritten: give another name"
    return f"{shorten(name)}: {reason}"
