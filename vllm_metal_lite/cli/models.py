"""`vllm-metal-lite models`: the models on this machine, and how each would run."""

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from vllm_metal_lite import backend
from vllm_metal_lite.cli import log
from vllm_metal_lite.cli.model_table import gib, table
from vllm_metal_lite.cli.options import UsageError
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.devices import profile
from vllm_metal_lite.errors import shorten

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
    log.progress("looking for models")
    found = find_models(folders)
    for i, model in enumerate(found):
        log.progress(f"reading {i + 1} of {len(found)}: {model.name}")
        entries.append(describe(model))
    log.clear()
    if args.json:
        report = {
            "backend": backend.name(),
            "memory_bytes": backend.memory_limit(),
            "memory_fraction": _fraction(),
            "models": [asdict(entry) for entry in entries],
        }
        print(json.dumps(report, indent=2))
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table(entries, width):
        print(line)
    if any(entry.supported for entry in entries):
        memory = f"{gib(backend.memory_limit() * _fraction())} GiB"
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
