"""Which attention path serves a model on this device, and why."""

import warnings
from collections.abc import Sequence

from vllm_metal_lite import backend
from vllm_metal_lite.attention.kernels import KernelAttention
from vllm_metal_lite.attention.reference import ReferenceAttention
from vllm_metal_lite.attention.step import Attention, AttentionShape
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.kernels import ops, selfcheck
from vllm_metal_lite.kv.store import PagedStore


def choose(
    option: str, store: PagedStore, shapes: Sequence[AttentionShape]
) -> tuple[Attention, str]:
    """The path for a model that attends with `shapes`, and the reason in a few words.

    option: "reference", "kernels" or "auto".  Under "auto" kernels that cannot run here, or that
    disagree with the reference, give way to it, the latter with a warning; under "kernels" that
    raises ConfigError.
    """
    if option == "reference":
        return ReferenceAttention(store), "asked for"
    reason = _unsupported(option, shapes)
    if reason is None:
        for shape in shapes:
            failures = selfcheck.passes(shape, store.block_size)
            if failures:
                reason = f"kernels fail their check: {failures[0]}"
                if option == "auto":
                    warnings.warn(
                        f"{reason}; using the reference attention, which is slower. "
                        "Please report what `vllm-metal-lite doctor` prints.",
                        stacklevel=2,
                    )
                break
    if reason is None:
        return KernelAttention(store), "kernels agree with the reference on this device"
    if option == "kernels":
        raise ConfigError(f"attention='kernels' is not possible: {reason}")
    return ReferenceAttention(store), reason


def _unsupported(option: str, shapes: Sequence[AttentionShape]) -> str | None:
    if option == "auto" and backend.is_cpu():
        return "kernels need a GPU"
    return next((reason for s in shapes if (reason := ops.unsupported(s))), None)
