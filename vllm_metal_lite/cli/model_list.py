"""The models on this machine, and how each would run.

No weight is read, and nothing is downloaded.
"""

import gc
import io
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.model_table import ModelEntry
from vllm_metal_lite.cli.options import engine_flag
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import MetalLiteError, ModelLoadError, OutOfMemoryError, one_line
from vllm_metal_lite.model.files import (
    DEMO_PATH,
    hub_names,
    in_cache,
    read_config,
    read_json,
    weights,
)
from vllm_metal_lite.model.loader import LoadedModel, preview
from vllm_metal_lite.runner.memory import size_store
from vllm_metal_lite.runner.step_peak import estimated_step_peak

DEPTH = 3  # levels of folders that are searched below a given one


def find_models(folders: Sequence[Path]) -> list[ModelEntry]:
    """The demo, the models of the Hugging Face cache, and those in the folders; each once."""
    found = [ModelEntry("demo", "demo", str(DEMO_PATH))]
    for name in hub_names():
        try:
            found.append(ModelEntry(name, "hub", str(in_cache(name))))
        except (ModelLoadError, OSError) as e:
            found.append(ModelEntry(name, "hub", None, problem=_reason(e, name)))
    for folder in folders:
        below = list(_below(folder, DEPTH))
        found += [ModelEntry(str(path), "folder", str(path)) for path in below]
        if not below:
            problem = f"no model in it, nor in folders up to {DEPTH} levels below"
            found.append(ModelEntry(str(folder), "folder", None, problem=problem))
    once = {os.path.realpath(model.path or model.name): model for model in reversed(found)}
    return list(reversed(once.values()))


def _below(folder: Path, depth: int) -> Iterator[Path]:
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
            yield from _below(child, depth - 1)


def _is_candidate(folder: Path) -> bool:
    """Whether the folder looks like a model."""
    config = folder / "config.json"
    if not config.is_file():
        return False
    if next(folder.glob("model*.safetensors"), None) is not None:
        return True
    with config.open("rb") as file:
        return b'"model_type"' in file.read(1 << 20)


def describe(found: ModelEntry) -> ModelEntry:
    """Everything that is known of a model."""
    if found.path is None:
        return found
    facts: dict[str, Any] = {}
    problem = None
    try:
        with _quiet():
            _read(found.name, Path(found.path), facts)
    except (MetalLiteError, OSError) as e:
        problem = _reason(e, found.name)
    gc.collect()  # modules have circles, and hold open files
    return replace(found, supported=problem is None, problem=problem, **facts)


def _read(name: str, folder: Path, facts: dict[str, Any]) -> None:
    """Put what is known into `facts`, as far as it goes."""
    facts["size_bytes"] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    with suppress(ModelLoadError, OSError):  # also of a model that cannot be loaded
        model_type = read_json(folder / "config.json").get("model_type")
        facts["model_type"] = model_type if isinstance(model_type, str) else None
    config = read_config(folder, name)
    quantization = config.get("quantization") or config.get("quantization_config")
    facts["quantization"] = quantization
    model = preview(folder, name)
    packed = model.packed
    runs = "in sequences" if packed.in_sequences else "packed"
    facts |= {
        "bits": _bits(folder, quantization),
        "context": model.max_position,
        "context_guess": model.context_guess,
        "runs": "by segment" if packed.by_segment else runs,
        "runs_reason": packed.by_segment or packed.in_sequences,
        "prefix_cache": packed.no_prefix_cache is None,
        "prefix_cache_reason": packed.no_prefix_cache,
        "weight_bytes": model.weight_bytes,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "state_bytes": model.state_bytes,
        **_memory(model, EngineConfig()),
    }


def _memory(model: LoadedModel, options: EngineConfig) -> dict[str, Any]:
    """How much context fits, by the arithmetic with which an engine starts."""
    try:
        store = size_store(model, options, estimated_step_peak)
    except OutOfMemoryError as e:
        problem = e.spelled(engine_flag).removeprefix(f"{model.name} does not fit: ")
        return {"max_model_len": 0, "num_tokens": 0, "memory_problem": problem}
    num_tokens = store.groups[0].num_blocks * options.block_size
    return {"max_model_len": store.max_model_len, "num_tokens": num_tokens}


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
    """The reason alone: the name stands beside it."""
    message = e.spelled(engine_flag) if isinstance(e, MetalLiteError) else one_line(e)
    return message.removeprefix(f"{name}: ").removeprefix("cannot load this model: ")


@contextmanager
def _quiet() -> Iterator[None]:
    """Print no warnings: they concern only users who load the model."""
    logger = logging.getLogger("vllm_metal_lite")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
