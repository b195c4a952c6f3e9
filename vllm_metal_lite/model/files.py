"""A model's folder: finds the folder by the model's name, and reads what it says of itself.

A name is "demo" (shipped in the package), a local folder, or a Hugging Face repository.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from vllm_metal_lite.errors import ModelLoadError, one_line, shorten, show

DEMO_PATH = Path(__file__).parent.parent / "demo_model"

# The start of a git-lfs pointer, which git checks out if git-lfs is not installed.
_LFS_FIRST_WORDS = b"version https://git-lfs"
_A_MODEL = (
    "a model is 'demo', a local folder, or a Hugging Face name such as "
    "mlx-community/Qwen3-0.6B-4bit"
)


def find(name: str) -> Path:
    """The folder of a model; downloads (with progress) from Hugging Face if needed."""
    if not isinstance(name, (str, Path)):
        raise ModelLoadError(f"{_A_MODEL}, got {show(name)}")
    if name == "demo":
        return DEMO_PATH
    name, exists = str(name), False
    with suppress(OSError, RuntimeError, ValueError):  # too long; no such user; half a surrogate
        path = Path(name).expanduser()
        if path.is_dir():
            return path
        exists = path.exists()
    if exists:
        raise ModelLoadError(f"{name}: a model is a folder, this is a file")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "~")):
        raise ModelLoadError(f"{shorten(name)}: no such folder; {_A_MODEL}")
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    shown = shorten(name)
    try:
        return Path(snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS))
    except errors.GatedRepoError as e:
        raise ModelLoadError(
            f"{shown}: access to this model must be asked for on its page, then `hf auth login`"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise ModelLoadError(f"{shown}: there is no such model on the Hugging Face Hub") from e
    except Exception as e:  # the hub's client has many errors for "no network"
        raise ModelLoadError(
            f"{shown}: not in the local cache, and the Hugging Face Hub cannot be reached "
            f"({one_line(e)})"
        ) from e


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise ModelLoadError(f"{path}: not readable as JSON: {one_line(e)}") from e
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must be a JSON object")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model's folder; ModelLoadError if it is none, or if files are missing."""
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path}: not a model folder: it has no config.json")
    _refuse_pointers(path)
    config = read_json(path / "config.json")
    if "model_type" not in config:
        raise ModelLoadError(f"{path / 'config.json'}: has no model_type")
    if not list(path.glob("model*.safetensors")):
        raise ModelLoadError(f"{path}: not a model folder: it has no model*.safetensors")
    return config


def _refuse_pointers(path: Path) -> None:
    """Raise ModelLoadError for a clone whose large files git-lfs has not downloaded."""
    pointers = sorted(f.name for f in path.iterdir() if f.is_file() and _is_pointer(f))
    if pointers:
        more = f" (so are {len(pointers) - 1} more)" if len(pointers) > 1 else ""
        raise ModelLoadError(
            f"{path}: {pointers[0]} is a git-lfs pointer and not the file itself{more}: run "
            "`git lfs install`, then `git lfs pull` in this folder"
        )


def _is_pointer(file: Path) -> bool:
    try:
        with file.open("rb") as f:
            return f.read(len(_LFS_FIRST_WORDS)) == _LFS_FIRST_WORDS
    except OSError:  # loading the model reports the reason
        return False
