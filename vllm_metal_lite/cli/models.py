"""`vllm-metal-lite models`: the models on this machine, and how each would run."""

import argparse
import json
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_metal_lite import backend
from vllm_metal_lite.cli import log
from vllm_metal_lite.cli.options import UsageError
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.devices import profile
from vllm_metal_lite.errors import shorten

if TYPE_CHECKING:
    from vllm_metal_lite.cli.model_list import ModelEntry

logger = logging.getLogger(__name__)

_HEADINGS = ("type", "size", "bits", "context", "runs", "cache", "fits")
_NAME = "name"
_GAP, _INDENT = "  ", "    "
_SHORTEST_NAME = 8  # columns for names, however narrow the terminal

_LEGEND = """\
context  tokens that the model was made for
runs     packed: all requests in one pass; sequences: recurrent layers see a
         sequence at a time; segments: attention too, which is slow.  Known from
         the model's code: loading also compares results.
cache    whether prefixes of prompts are cached
fits     tokens of context, of all requests together, that fit into {memory}
         beside the weights (estimated; default options)"""


def run(args: argparse.Namespace) -> int:
    """Run the command `models`."""
    folders = [_folder(name) for name in args.folders]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from vllm_metal_lite.cli.model_list import describe, find_models

    entries = []
    with log.progress():
        logger.info("looking for models", extra={"transient": True})
        found = find_models(folders)
        for i, model in enumerate(found):
            text = f"reading {i + 1} of {len(found)}: {model.name}"
            logger.info(text, extra={"transient": True})
            entries.append(describe(model))
    if args.json:
        print(json.dumps(_report(entries), indent=2))
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table(entries, width):
        print(line)
    if any(entry.supported for entry in entries):
        memory = f"{_gib(backend.memory_limit() * _fraction())} GiB"
        print("\n" + _LEGEND.format(memory=memory))
    return 0


def _folder(name: str) -> Path:
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError, ValueError):  # too long; no such user; half a surrogate
        pass
    raise UsageError(f"{shorten(name)}: no such folder")


def _fraction() -> float:
    """The share of the memory that an engine may use."""
    return EngineConfig().memory_fraction or profile().memory_fraction


def _report(entries: "Sequence[ModelEntry]") -> dict[str, object]:
    return {
        "backend": backend.name(),
        "memory_bytes": backend.memory_limit(),
        "memory_fraction": _fraction(),
        "models": [asdict(entry) for entry in entries],
    }


def table(entries: "Sequence[ModelEntry]", width: int | None) -> Iterator[str]:
    """Lines of at most `width` columns (None: any) but for long names.

    A name that is too long for its column has a line of its own.
    """
    rows: list[tuple[str, tuple[str, ...]]] = [(_NAME, _HEADINGS)]
    rows += [(entry.name, _cells(entry)) for entry in entries if entry.supported]
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(_HEADINGS))]
    room = max(len(name) for name, _ in rows)
    if width is not None:
        beside = sum(widths) + len(_GAP) * len(widths)
        room = min(room, max(width - beside, _SHORTEST_NAME))
    for name, cells in rows:
        if len(name) > room:
            yield name
            name = ""
        pairs = zip(cells, widths, strict=True)
        line = _GAP.join([name.ljust(room), *(cell.ljust(size) for cell, size in pairs)])
        yield line.rstrip()
    for title, reasons in (
        ("do not fit:", [(e.name, e.memory_problem) for e in entries if e.memory_problem]),
        ("cannot run:", [(_with_type(e), e.problem) for e in entries if e.problem]),
    ):
        if reasons:
            yield from ("", title)
        for name, reason in reasons:
            yield name
            yield from _indented(reason or "", width)


def _with_type(entry: "ModelEntry") -> str:
    return f"{entry.name} ({entry.model_type})" if entry.model_type else entry.name


def _indented(text: str, width: int | None) -> list[str]:
    if width is None:
        return [_INDENT + text]
    room = max(width, len(_INDENT) + _SHORTEST_NAME)
    return textwrap.wrap(
        text,
        room,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cells(entry: "ModelEntry") -> tuple[str, ...]:
    return (
        entry.model_type or "unknown",
        f"{_gib(entry.size_bytes or 0)}G",
        "+".join(map(str, entry.bits)) or "?",
        _count(entry.context),
        {"by segment": "segments", "in sequences": "sequences"}.get(entry.runs or "", "packed"),
        "yes" if entry.prefix_cache else "no",
        _count(entry.num_tokens) if entry.num_tokens else "no",
    )


def _gib(size: float) -> str:
    gib = size / 2**30
    return f"{gib:.2f}" if gib < 1 else f"{gib:.1f}" if gib < 100 else f"{gib:.0f}"


def _count(number: int | None) -> str:
    """A number of tokens, such as 512, 40k (of 1024) or 1.0M."""
    if number is None:
        return "?"
    if number < 1024:
        return str(number)
    k = number / 1024
    return f"{k:.0f}k" if k < 1000 else f"{k / 1024:.1f}M"
