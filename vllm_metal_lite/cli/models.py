"""`vllm-metal-lite models`: the models on this machine, and how each would run.

No weight is read, and nothing is downloaded.
"""

import argparse
import gc
import io
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli import log
from vllm_metal_lite.cli.files import report_text
from vllm_metal_lite.cli.options import UsageError, engine_flag, local
from vllm_metal_lite.cli.shared_report import context_that_fits
from vllm_metal_lite.devices import profile
from vllm_metal_lite.errors import MetalLiteError, ModelLoadError, one_line, shorten, size_text
from vllm_metal_lite.model.files.find import DEMO_PATH, hub_names, in_cache
from vllm_metal_lite.model.files.folder import read_config, read_json, weight_files, weights
from vllm_metal_lite.model.loader import preview
from vllm_metal_lite.runner.step_peak import estimated_step_peak

DEPTH = 3  # levels of folders that are searched below a given one
_HEADINGS = ("name", "type", "size", "bits", "context", "runs", "cache", "fits")
_LEGEND = """\
context  tokens that the model was made for
runs     packed: all requests in one pass; sequences: recurrent layers see a
         sequence at a time; segments: attention too, which is slow.  Known from
         the model's code: loading also compares results.
cache    whether prefixes of prompts are cached
fits     tokens of context, of all requests together, that fit into {memory}
         beside the weights (estimated; default options)"""

# The facts of a model, as `--json` prints them.  name, source ("demo", "hub" or "folder"), path,
# supported and problem are always there.  The rest is there if the model can be read.
Entry = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Run the command `models`."""
    folders = [_folder(name) for name in args.folders]
    entries = []
    log.progress("looking for models")
    found = find_models(folders)
    for i, model in enumerate(found):
        log.progress(f"reading {i + 1} of {len(found)}: {model['name']}")
        entries.append(describe(model))
    log.clear()
    fraction = profile().memory_fraction
    memory = backend.memory_limit()
    if args.json:
        report = {"backend": backend.name(), "memory_bytes": memory, "memory_fraction": fraction}
        print(report_text({**report, "models": entries}))
        return 0
    for line in table(entries):
        print(line)
    if any(entry["supported"] for entry in entries):
        print("\n" + _LEGEND.format(memory=size_text(memory * fraction)))
    return 0


def _folder(name: str) -> Path:
    path = local(name)
    if path is None or not path.is_dir():
        raise UsageError(f"{shorten(name)}: no such folder")
    return path


def find_models(folders: Sequence[Path]) -> list[Entry]:
    """The demo, the models of the Hugging Face cache, and those in the folders; each once."""
    found = [_new_entry("demo", "demo", DEMO_PATH)]
    for name in hub_names():
        try:
            found.append(_new_entry(name, "hub", in_cache(name)))
        except (ModelLoadError, OSError) as e:
            found.append(_new_entry(name, "hub", None, _reason(e, name)))
    for folder in folders:
        below = list(_model_folders(folder, DEPTH))
        found += [_new_entry(str(path), "folder", path) for path in below]
        if not below:
            problem = f"no model in it, nor in folders up to {DEPTH} levels below"
            found.append(_new_entry(str(folder), "folder", None, problem))
    once = {os.path.realpath(model["path"] or model["name"]): model for model in reversed(found)}
    return list(reversed(once.values()))


def _new_entry(name: str, source: str, path: Path | None, problem: str | None = None) -> Entry:
    entry = {"name": name, "source": source, "path": path and str(path)}
    return {**entry, "supported": False, "problem": problem}


def _model_folders(folder: Path, depth: int) -> Iterator[Path]:
    """The folders of models in a folder, itself included."""
    try:
        if _is_candidate(folder):
            yield folder
            return
        children = sorted(c for c in folder.iterdir() if c.is_dir() and c.name[0] != ".")
    except OSError:
        return
    if depth:
        for child in children:
            yield from _model_folders(child, depth - 1)


def _is_candidate(folder: Path) -> bool:
    """Whether the folder looks like a model."""
    config, has_weights = folder / "config.json", bool(weight_files(folder))
    return config.is_file() and (has_weights or b'"model_type"' in config.read_bytes())


def describe(found: Entry) -> Entry:
    """All facts of a model that was found."""
    if found["path"] is None:
        return found
    entry = dict(found)
    try:
        with _quiet():
            _read(entry, Path(found["path"]))
        entry["supported"] = True
    except (MetalLiteError, OSError) as e:
        entry["problem"] = _reason(e, found["name"])
    gc.collect()  # modules have circles, and hold open files
    return entry


def _read(entry: Entry, folder: Path) -> None:
    """Add the facts that can be read; stop at the first error.

    runs: "packed", "in sequences" or "by segment"; runs_reason: why not packed.
    """
    entry["size_bytes"] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    with suppress(ModelLoadError, OSError):  # also of a model that cannot be loaded
        model_type = read_json(folder / "config.json").get("model_type")
        entry["model_type"] = model_type if isinstance(model_type, str) else None
    config = read_config(folder, entry["name"])
    quantization = config.get("quantization") or config.get("quantization_config")
    model = preview(folder, entry["name"])
    packed = model.packed
    entry |= {
        "bits": _bits(folder, quantization),
        "quantization": quantization,
        "context": model.max_position,
        "context_guess": model.context_guess,
        "runs": packed.mode,
        "runs_reason": packed.reason,
        "prefix_cache": True,
        "prefix_cache_reason": None,
        "weight_bytes": model.weight_bytes,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "state_bytes": model.state_bytes,
        **context_that_fits(model, estimated_step_peak),
    }


def _bits(folder: Path, quantization: dict[str, Any] | None) -> list[int]:
    """Bits of a weight, by the configuration, or by the headers of its files."""
    if quantization:
        layers = [quantization, *(v for v in quantization.values() if isinstance(v, dict))]
        return sorted({b for layer in layers if isinstance(b := layer.get("bits"), int)})
    sizes = Counter[int]()
    for _, weight in weights(folder):
        if mx.issubdtype(weight.dtype, mx.floating):
            sizes[8 * weight.itemsize] += weight.nbytes
    return [bits for bits, _ in sizes.most_common(1)]


def _reason(e: MetalLiteError | OSError, name: str) -> str:
    """The reason without the model's name, which the list shows anyway."""
    message = e.spelled(engine_flag) if isinstance(e, MetalLiteError) else one_line(e)
    return message.removeprefix(f"{name}: ").removeprefix("cannot load this model: ")


@contextmanager
def _quiet() -> Iterator[None]:
    """Print no warnings, because they concern only users that load the model."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def table(entries: Sequence[Entry]) -> Iterator[str]:
    """Lines for people.  Names of files and words of configurations cannot control the terminal."""
    rows = [_HEADINGS, *(_cells(entry) for entry in entries if entry["supported"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for title, reason in ("do not fit:", "memory_problem"), ("cannot run:", "problem"):
        if found := [entry for entry in entries if entry.get(reason)]:
            lines += ["", title]
        for entry in found:
            kind = f" ({entry['model_type']})" if entry.get("model_type") else ""
            lines += [f"{entry['name']}{kind}", f"    {entry[reason]}"]
    for line in lines:
        yield "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def _cells(entry: Entry) -> tuple[str, ...]:
    return (
        entry["name"],
        entry["model_type"],
        size_text(entry["size_bytes"]),
        "+".join(map(str, entry["bits"])) or "?",
        _count(entry["context"]),
        {"by segment": "segments", "in sequences": "sequences"}.get(entry["runs"], "packed"),
        "yes" if entry["prefix_cache"] else "no",
        _count(entry["num_tokens"]) if entry["num_tokens"] else "no",
    )


def _count(number: int) -> str:
    """A number of tokens, such as 512, 40k (of 1024) or 1.0M."""
    if number < 1024:
        return str(number)
    k = number / 1024
    return f"{k:.0f}k" if k < 999.5 else f"{k / 1024:.1f}M"
