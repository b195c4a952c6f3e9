"""Reads vLLM 0.27.1 to 0.33: their differences are detected by attribute, not by version number.

An option or request field that a version lacks reads as None, so one that has moved is read at
both places (refusals.py).  Each version has two formats of the scheduler's output (translate.py).
"""

from typing import Any


def get(root: Any, path: str) -> Any:
    """An option or field by its dotted path; None if this vLLM lacks it."""
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def guard_torch_accelerator() -> None:
    """Stub the cache calls that vLLM makes at exit: without an accelerator, torch's raise."""
    import torch

    if not torch.accelerator.is_available():
        for name in ("empty_cache", "empty_host_cache"):
            setattr(torch.accelerator, name, lambda: None)
