"""A model as `vllm-metal-lite models` shows it, and the table of all."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_HEADINGS = ("type", "size", "bits", "context", "runs", "cache", "fits")
_GAP, _INDENT = "  ", "    "
_SHORTEST_NAME = 8  # columns for names, however narrow the terminal


@dataclass(frozen=True)
class ModelEntry:
    """What is known of a model; None: unknown, as after a failure, which `problem` names.

    size_bytes: of the folder's files.  bits: of a weight, several if they differ.
    runs: "packed", "in sequences" (modules with recurrent states see one sequence at a time) or "by
    segment" (attention too); runs_reason: why not packed.  prefix_cache_reason: why there is none.
    max_model_len: the longest request here.  num_tokens: tokens of all requests together that fit
    in memory beside the weights; 0: the model does not fit, and memory_problem says why.
    """

    name: str
    source: str
    path: str | None
    supported: bool = False
    problem: str | None = None
    model_type: str | None = None
    size_bytes: int | None = None
    bits: list[int] = field(default_factory=list)
    quantization: dict[str, Any] | None = None
    context: int | None = None
    context_guess: str | None = None
    runs: str | None = None
    runs_reason: str | None = None
    prefix_cache: bool | None = None
    prefix_cache_reason: str | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    state_bytes: int | None = None
    max_model_len: int | None = None
    num_tokens: int | None = None
    memory_problem: str | None = None


def table(entries: Sequence[ModelEntry], width: int | None) -> Iterator[str]:
    """Lines of at most `width` columns (None: any) but for long names.

    A name that is too long for its column has a line of its own.  Names of files and words of
    configurations cannot control the terminal.
    """
    for line in _lines(entries, width):
        yield "".join(c if c.isprintable() else "�" for c in line)


def _lines(entries: Sequence[ModelEntry], width: int | None) -> Iterator[str]:
    rows: list[tuple[str, tuple[str, ...]]] = [("name", _HEADINGS)]
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


def _with_type(entry: ModelEntry) -> str:
    return f"{entry.name} ({entry.model_type})" if entry.model_type else entry.name


def _indented(text: str, width: int | None) -> list[str]:
    if width is None:
        return [_INDENT + text]
    room = max(width - len(_INDENT), _SHORTEST_NAME)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return [_INDENT + line for line in lines]


def _cells(entry: ModelEntry) -> tuple[str, ...]:
    return (
        entry.model_type or "unknown",
        f"{gib(entry.size_bytes or 0)}G",
        "+".join(map(str, entry.bits)) or "?",
        _count(entry.context),
        {"by segment": "segments", "in sequences": "sequences"}.get(entry.runs or "", "packed"),
        "yes" if entry.prefix_cache else "no",
        _count(entry.num_tokens) if entry.num_tokens else "no",
    )


def gib(size: float) -> str:
    """Bytes in GiB, without the unit."""
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
