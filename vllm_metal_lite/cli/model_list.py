"""The models on this machine, and how each would run.

No weight is read, and nothing is downloaded.
"""

import gc
import io
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_metal_lite.cli.model_table import ModelEntry
from vllm_metal_lite.cli.options import engine_flag
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import MetalLiteError, ModelLoadError, OutOfMemoryError, one_line
from vllm_metal_lite.model.files import DEMO_PATH, read_config
from vllm_metal_lite.model.loader import LoadedModel, preview
from vllm_metal_lite.runner.memory import size_store
from vllm_metal_lite.runner.step_peak import estimated_step_peak

DEPTH = 3  # levels of folders that are searched below a given one

_DTYPE_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}


@dataclass(frozen=True)
class FoundModel:
    """name: as other commands take it.  path: its folder.  problem: why it cannot be read."""

    name: str
    source: str  # "demo", "hub" or "folder"
    path: Path | None
    problem: str | None = None


def find_models(folders: Sequence[Path]) -> list[FoundModel]:
    """The demo, the models of the Hugging Face cache, and those in the folders; each once."""
    found = [FoundModel("demo", "demo", DEMO_PATH), *_in_hub_cache()]
    for folder in folders:
        below = list(_below(folder, DEPTH))
        found += [FoundModel(str(path), "folder", path) for path in below]
        if not below:
            problem = f"no model in it, nor in folders up to {DEPTH} levels below"
            found.append(FoundModel(str(folder), "folder", None, problem))
    once = {model.path.resolve() if model.path else model.name: model for model in reversed(found)}
    return list(reversed(once.values()))


def _in_hub_cache() -> Iterator[FoundModel]:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    except (OSError, ValueError) as e:
        yield FoundModel(str(constants.HF_HUB_CACHE), "hub", None, one_line(e))
        return
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id.lower()):
        if repo.repo_type != "model":
            continue
        main = repo.refs.get("main")
        revision = main or max(repo.revisions, key=lambda r: r.last_modified, default=None)
        if revision is None:
            yield FoundModel(repo.repo_id, "hub", None, "no file of it is in the cache")
        else:
            yield FoundModel(repo.repo_id, "hub", revision.snapshot_path)
    for warning in cache.warnings:
        yield FoundModel(str(constants.HF_HUB_CACHE), "hub", None, one_line(warning))


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


def describe(found: FoundModel) -> ModelEntry:
    """Everything that is known of a model."""
    path = found.path
    facts: dict[str, Any] = {}
    problem = found.problem
    if path is not None:
        try:
            with _quiet():
                facts["size_bytes"] = _size(path)
                _read(found.name, path, facts)
        except (MetalLiteError, OSError) as e:
            problem = _reason(e, found.name, path)
        gc.collect()  # modules have circles, and hold open files
    return ModelEntry(
        found.name,
        found.source,
        None if path is None else str(path),
        supported=problem is None,
        problem=problem,
        **facts,
    )


def _read(name: str, path: Path, facts: dict[str, Any]) -> None:
    """Put what is known into `facts`, as far as it goes."""
    facts["model_type"] = _model_type(path)
    config = read_config(path)
    quantization = config.get("quantization") or config.get("quantization_config")
    facts["quantization"] = quantization if isinstance(quantization, dict) else None
    facts["bits"] = _bits(path, facts["quantization"])
    _check_complete(path)
    options = EngineConfig()
    model = preview(path, name)
    packed = model.packed
    facts |= {
        "context": model.max_position,
        "context_guess": model.context_guess,
        "runs": "by segment" if packed.by_segment else "packed",
        "runs_reason": packed.by_segment or packed.in_sequences,
        "prefix_cache": packed.no_prefix_cache is None,
        "prefix_cache_reason": packed.no_prefix_cache,
        "weight_bytes": model.weight_bytes,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "state_bytes": model.state_bytes,
    }
    if packed.in_sequences and not packed.by_segment:
        facts["runs"] = "in sequences"
    facts |= _memory(model, options)


def _memory(model: LoadedModel, options: EngineConfig) -> dict[str, Any]:
    """How much context fits, by the arithmetic with which an engine starts."""
    try:
        store = size_store(model, options, estimated_step_peak)
    except OutOfMemoryError as e:
        problem = e.spelled(engine_flag).removeprefix(f"{model.name} does not fit: ")
        return {"max_model_len": 0, "num_tokens": 0, "memory_problem": problem}
    num_tokens = store.groups[0].num_blocks * options.block_size
    return {"max_model_len": store.max_model_len, "num_tokens": num_tokens}


def _size(path: Path) -> int:
    """Bytes of all files; links count as what they lead to, as in the hub's cache."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _model_type(path: Path) -> str | None:
    try:
        model_type = json.loads((path / "config.json").read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return model_type if isinstance(model_type, str) else None


def _bits(path: Path, quantization: dict[str, Any] | None) -> list[int]:
    """Bits of a weight, by the configuration, or by the header of a file."""
    if quantization is not None:
        layers = [quantization, *(v for v in quantization.values() if isinstance(v, dict))]
        return sorted({b for layer in layers if isinstance(b := layer.get("bits"), int)})
    sizes: dict[int, int] = {}
    for tensor in _header(next(path.glob("model*.safetensors"))).values():
        if isinstance(tensor, dict) and (bits := _DTYPE_BITS.get(str(tensor.get("dtype")))):
            start, end = tensor["data_offsets"]
            sizes[bits] = sizes.get(bits, 0) + end - start
    return [max(sizes, key=lambda bits: sizes[bits])] if sizes else []


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: the size as 8 bytes, then JSON."""
    try:
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(min(size, 100 << 20)))
    except ValueError as e:
        raise ModelLoadError(f"{file.name}: not readable as safetensors: {one_line(e)}") from e
    return header if isinstance(header, dict) else {}


def _check_complete(path: Path) -> None:
    """Raise ModelLoadError if files of weights are missing."""
    try:
        index = json.loads((path / "model.safetensors.index.json").read_bytes())
        files = sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ModelLoadError(f"model.safetensors.index.json: not readable: {one_line(e)}") from e
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise ModelLoadError(
            f"{len(missing)} of its {len(files)} files of weights are missing, such as {missing[0]}"
        )


def _reason(e: MetalLiteError | OSError, name: str, path: Path) -> str:
    """The reason alone: the name stands beside it."""
    message = e.spelled(engine_flag) if isinstance(e, MetalLiteError) else one_line(e)
    for start in (f"{path}: ", f"{name}: ", "cannot load this model: ", f"{path}/"):
        message = message.removeprefix(start)
    return message


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is printed: warnings are for those who load a model."""
    logger = logging.getLogger("vllm_metal_lite")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
