"""The checks of the kernels that one model uses, and the functions that registry rows name."""

from collections.abc import Callable
from typing import Any

from vllm_metal_lite.checks import attention, new_rows, products, recurrent
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.kernels.registry import KernelRow
from vllm_metal_lite.specs import KernelUse

# The modules of checks, in the order in which the kernels build on each other.
_MODULES = {
    "attention": attention,
    "new_rows": new_rows,
    "recurrent": recurrent,
    "products": products,
}


def checks_for(use: KernelUse) -> list[Check]:
    """Each kernel at the model's shapes, and no other kernel."""
    found = (module.checks(use) for module in _MODULES.values())
    return list(dict.fromkeys(check for checks in found for check in checks))


def function(row: KernelRow, name: str) -> Callable[..., Any]:
    """The function of a row's module: its check, or its timing."""
    return getattr(_MODULES[row.module], name)
