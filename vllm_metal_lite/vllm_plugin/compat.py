"""What differs between vLLM 0.27.1 and 0.33, by what is there and not by version numbers.

Little does: most options and request fields that we name are in all of these, and what is missing
is not asked for.  The scheduler's output has two dialects in each of them, see `translate.py`.
"""

from typing import Any


def get(root: Any, path: str) -> Any:
    """An option or field by its dotted path; None where this vLLM does not have it."""
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def guard_torch_accelerator() -> None:
    """vLLM empties torch's accelerator cache when it ends; without an accelerator torch raises."""
    import torch

    if not torch.accelerator.is_available():
        for name in ("empty_cache", "empty_host_cache"):
            setattr(torch.accelerator, name, lambda: None)
