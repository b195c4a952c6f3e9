"""Checks the files of a model's folder, and reads its JSON and the headers of its weights."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import (
    ModelLoadError,
    Option,
    RemoteCodeError,
    one_line,
    show,
)

logger = logging.getLogger(__name__)

# The files that loading reads: no code, and no texts for people.
READ_PATTERNS = [p for p in DEFAULT_ALLOW_PATTERNS if p not in ("*.py", "*.txt")]
READ_PATTERNS += ["merges.txt", "vocab.txt"]

Weights = dict[str, mx.array]
# The start of a git-lfs pointer, which git checks out if git-lfs is not installed.
_LFS_FIRST_WORDS = b"version https://git-lfs"


def read_json(file: Path, kind: type = dict) -> Any:
    """The JSON object in a file, or the array if `kind` is list; empty if the file is missing."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, RecursionError) as e:
        raise ModelLoadError(f"{file.name}: not readable as JSON: {one_line(e)}") from e
    if not isinstance(value, kind):
        wanted = "object" if kind is dict else "array"
        raise ModelLoadError(f"{file.name}: must be a JSON {wanted}")
    return value


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Read config.json; raises ModelLoadError if files of the folder are missing or do not fit
    it."""
    try:
        _check_links(folder)
        if not (folder / "config.json").is_file():
            raise ModelLoadError("not a model folder: it has no config.json")
        _refuse_pointers(folder)
        config = read_json(folder / "config.json")
        if "model_type" not in config:
            raise ModelLoadError("config.json has no model_type")
        if not weight_files(folder):
            raise ModelLoadError("not a model folder: it has no model*.safetensors")
        _check_shards(folder)
        for key in ("quantization", "quantization_config"):
            if not isinstance(how := config.get(key), dict | None):
                raise ModelLoadError(f"config.json: {key} must be an object, got {show(how)}")
    except (ModelLoadError, OSError) as e:
        raise ModelLoadError(f"{name}: {e}") from e
    return config


def _check_links(folder: Path) -> None:
    """Raise ModelLoadError if a symlink, as in the Hugging Face cache, has lost its target."""
    for file in sorted(folder.iterdir()):
        is_read = any(fnmatch(file.name, pattern) for pattern in READ_PATTERNS)
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


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def weights(folder: Path) -> Iterator[tuple[str, mx.array]]:
    """Names and arrays of a model's weight files; only the headers are read."""
    for file in weight_files(folder):
        try:
            yield from cast(Weights, mx.load(str(file))).items()
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


@contextmanager
def loading(name: str, what: str) -> Iterator[None]:
    """Held while `what` is loaded: every failure becomes a ModelLoadError of one line."""
    try:
        yield
    except RemoteCodeError:
        raise
    except (Exception, SystemExit) as e:  # a broken folder can make the libraries raise anything
        exits = isinstance(e, SystemExit)  # mlx-lm's olmo, if a package that it needs is missing
        why = f"its code ends the process ({e})" if exits else one_line(e)
        raise ModelLoadError(f"{name}: cannot load {what}: {why}") from e


def remote_code_error(name: str, part: str, folder: Path) -> RemoteCodeError:
    return RemoteCodeError(
        f"{name}: its {part} is Python code that comes with the model: read it in {folder}, "
        "and set ",
        Option("trust_remote_code"),
        " to run it",
    )
