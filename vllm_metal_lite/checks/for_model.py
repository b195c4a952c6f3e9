"""The checks of the kernels that one model uses, and the functions that registry rows name."""

from collections.abc import Callable

from vllm_metal_lite.checks import attention, new_rows, products, recurrent
from vllm_metal_lite.checks.check import Check, Pair
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


def check_of(row: KernelRow) -> Callable[..., float]:
    module, name = row.check.split(".")
    return getattr(_MODULES[module], name)


def timing_of(row: KernelRow) -> Callable[..., list[Pair]]:
    module, _ = row.check.split(".")
    return getattr(_MODULES[module], f"timed_{row.timed}")
