"""Finds a model's folder by the model's name.

A name is "demo" (shipped in the package), a local folder, or a Hugging Face repository.
"""

import re
from contextlib import suppress
from pathlib import Path

from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from vllm_metal_lite.errors import ModelLoadError, one_line, shorten, show
from vllm_metal_lite.model.files.folder import READ_PATTERNS

DEMO_PATH = Path(__file__).parents[2] / "demo_model"
_A_MODEL = (
    "a model is 'demo', a local folder, or a Hugging Face name such as "
    "mlx-community/Qwen3-0.6B-4bit"
)


def find(name: str, download: bool = True) -> Path:
    """The folder of a model; downloads (with progress) from Hugging Face if needed."""
    if not isinstance(name, (str, Path)) or name == "":
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
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*--*")
    names = (f.name.removeprefix("models--").replace("--", "/", 1) for f in folders if f.is_dir())
    return sorted(names, key=str.lower)


def in_cache(name: str) -> Path:
    """The folder of a Hugging Face model in the cache: the snapshot of `main`, or else the newest.

    Raises ModelLoadError if a file is missing that loading may read.
    """
    from huggingface_hub import constants, errors, snapshot_download

    folder = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    snapshots = {s.name: s.stat().st_mtime for s in folder.glob("snapshots/*") if s.is_dir()}
    if not snapshots:
        raise ModelLoadError(f"{shorten(name)}: not in the local cache")
    revision = max(snapshots, key=lambda name: snapshots[name])
    with suppress(OSError, ValueError):
        main = (folder / "refs" / "main").read_text()
        revision = main if main in snapshots else revision
    try:
        snapshot = snapshot_download(
            name, revision=revision, local_files_only=True, allow_patterns=READ_PATTERNS
        )
    except (errors.LocalEntryNotFoundError, ValueError) as e:  # ValueError: not a valid name
        missing = re.search(r"\d+ file\(s\) are missing \(.*?\)", str(e))
        reason = missing[0] if missing else one_line(e)
        raise ModelLoadError(f"{shorten(name)}: not complete in the local cache: {reason}") from e
    return Path(snapshot)
