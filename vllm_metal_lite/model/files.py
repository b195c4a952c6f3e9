"""A model's folder: finds the folder by the model's name, and reads its configuration.

A name is "demo" (shipped in the package), a local folder, or a Hugging Face repository.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ModelLoadError, Option, RemoteCodeError, one_line, shorten, show

DEMO_PATH = Path(__file__).parent.parent / "demo_model"

# The files that loading reads: no code, and no texts for people.
_READ_PATTERNS = [p for p in DEFAULT_ALLOW_PATTERNS if p not in ("*.py", "*.txt")]
_READ_PATTERNS += ["merges.txt", "vocab.txt"]

# The start of a git-lfs pointer, which git checks out if git-lfs is not installed.
_LFS_FIRST_WORDS = b"version https://git-lfs"
_A_MODEL = (
    "a model is 'demo', a local folder, or a Hugging Face name such as "
    "mlx-community/Qwen3-0.6B-4bit"
)


def find(name: str, download: bool = True) -> Path:
    """The folder of a model; downloads (with progress) from Hugging Face if needed."""
    if not isinstance(name, (str, Path)):
        raise ModelLoadError(f"{_A_MODEL}, got {show(name)}")
    if name == "demo":
        return DEMO_PATH
    name, exists = str(name), False
    with suppress(OSError, RuntimeError, ValueError):  # too long; no such user; half a surrogate
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
        exists = folder.exists()
    if exists:
        raise ModelLoadError(f"{name}: a model is a folder, this is a file")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "~")):
        raise ModelLoadError(f"{shorten(name)}: no such folder; {_A_MODEL}")
    return _download(name) if download else in_cache(name)


def _download(name: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    shown = shorten(name)
    try:
        return Path(snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS))
    except Exception as e:  # the hub's client has many errors for "no network"
        why = one_line(e.__cause__ or e)
        try:
            return in_cache(name)
        except ModelLoadError as problem:
            text = f"{problem}, and the Hugging Face Hub cannot be reached ({why})"
        if isinstance(e, errors.GatedRepoError):
            text = f"{shown}: request access to this model on its page, then run `hf auth login`"
        elif isinstance(e, errors.RepositoryNotFoundError):
            text = f"{shown}: there is no such model on the Hugging Face Hub"
        elif isinstance(e, OSError) and e.errno:  # such as a full disk
            text = f"{shown}: cannot be downloaded: {why}"
        raise ModelLoadError(text) from e


def hub_names() -> list[str]:
    """The models of the Hugging Face cache."""
    folders = _hub_cache().glob("models--*--*")
    names = (f.name.removeprefix("models--").replace("--", "/", 1) for f in folders if f.is_dir())
    return sorted(names, key=str.lower)


def in_cache(name: str) -> Path:
    """The folder of a Hugging Face model in the cache: of `main`, or else the newest.

    Raises ModelLoadError if a file is missing that loading may read.
    """
    from huggingface_hub import errors, snapshot_download

    folder = _hub_cache() / f"models--{name.replace('/', '--')}"
    snapshots = {s.name: s.stat().st_mtime for s in folder.glob("snapshots/*") if s.is_dir()}
    if not snapshots:
        raise ModelLoadError(f"{shorten(name)}: not in the local cache")
    revision = max(snapshots, key=lambda name: snapshots[name])
    with suppress(OSError, ValueError):
        main = (folder / "refs" / "main").read_text()
        revision = main if main in snapshots else revision
    try:
        snapshot = snapshot_download(
            name, revision=revision, local_files_only=True, allow_patterns=_READ_PATTERNS
        )
    except (errors.LocalEntryNotFoundError, ValueError) as e:  # ValueError: not a valid name
        missing = re.search(r"\d+ file\(s\) are missing \(.*?\)", str(e))
        reason = missing[0] if missing else one_line(e)
        raise ModelLoadError(f"{shorten(name)}: not complete in the local cache: {reason}") from e
    return Path(snapshot)


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise ModelLoadError(f"{file.name}: not readable as JSON: {one_line(e)}") from e
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file.name}: must be a JSON object")
    return value


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """config.json of a model's folder; ModelLoadError if files are missing or do not fit it."""
    try:
        _check_links(folder)
        if not (folder / "config.json").is_file():
            raise ModelLoadError("not a model folder: it has no config.json")
        _refuse_pointers(folder)
        config = read_json(folder / "config.json")
        if "model_type" not in config:
            raise ModelLoadError("config.json has no model_type")
        if not list(folder.glob("model*.safetensors")):
            raise ModelLoadError("not a model folder: it has no model*.safetensors")
        _check_shards(folder)
        for key in ("quantization", "quantization_config"):
            if not isinstance(how := config.get(key), dict | None):
                raise ModelLoadError(f"config.json: {key} must be an object, got {show(how)}")
    except ModelLoadError as e:
        raise ModelLoadError(f"{name}: {e}") from e
    return config


def _check_links(folder: Path) -> None:
    """Raise ModelLoadError for links, as the Hugging Face cache has, whose files are gone."""
    for file in sorted(folder.iterdir()):
        is_read = any(fnmatch(file.name, pattern) for pattern in _READ_PATTERNS)
        if is_read and file.is_symlink() and not file.exists():
            raise ModelLoadError(
                f"{file.name} is a link to a file that is gone: download the model again"
            )


def _check_shards(folder: Path) -> None:
    """Raise ModelLoadError if files of weights are missing."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return
    try:
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        missing = [file for file in files if not (folder / file).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ModelLoadError(f"{index.name}: not readable: {one_line(e)}") from e
    if missing:
        raise ModelLoadError(
            f"{len(missing)} of its {len(files)} files of weights are missing, such as {missing[0]}"
        )


def weights(folder: Path) -> Iterator[tuple[str, mx.array]]:
    """Names and arrays of a model's weight files; only the headers are read."""
    for file in folder.glob("model*.safetensors"):
        try:
            yield from cast(dict[str, mx.array], mx.load(str(file))).items()
        except RuntimeError as e:
            raise ModelLoadError(f"{file.name}: {one_line(e)}") from e


def _refuse_pointers(folder: Path) -> None:
    """Raise ModelLoadError for a clone whose large files git-lfs has not downloaded."""
    pointers = sorted(f.name for f in folder.iterdir() if f.is_file() and _is_pointer(f))
    if pointers:
        more = f" (so are {len(pointers) - 1} more)" if len(pointers) > 1 else ""
        raise ModelLoadError(
            f"{pointers[0]} is a git-lfs pointer and not the file itself{more}: run "
            "`git lfs install`, then `git lfs pull` in this folder"
        )


def _is_pointer(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as f:  # loading the model reports the error
        return f.read(len(_LFS_FIRST_WORDS)) == _LFS_FIRST_WORDS
    return False


def remote_code_error(name: str, part: str, folder: Path) -> RemoteCodeError:
    return RemoteCodeError(
        f"{name}: its {part} is Python code that comes with the model: read it in {folder}, "
        "and set ",
        Option("trust_remote_code"),
        " to run it",
    )
