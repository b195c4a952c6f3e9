"""Differences between vLLM 0.27.1 and 0.33, detected by attribute, not by version number.

Most options and request fields that we read exist in all these versions; a missing one reads as
None.  Each version has two formats of the scheduler's output: see `translate.py`.
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
