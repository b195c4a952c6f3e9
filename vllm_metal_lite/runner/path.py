"""The path of a model's steps: the attention, the fused launches, and the way on without a kernel.

MLX compiles each variant of a kernel at its first launch, so a kernel may fail in mid-serving.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_metal_lite.attention.base import Attention
from vllm_metal_lite.kernels.launch import KernelError
from vllm_metal_lite.model.packed import NO_FUSION, Fusion


@dataclass(frozen=True)
class Path:
    """reason: why this attention was chosen, and which operations are fused.

    num_failed: kernels that failed on this device.
    without: the next best path if a kernel of this one fails; None if this one has no kernels.
    """

    attention: Attention
    fusion: Fusion = NO_FUSION
    reason: str = ""
    num_failed: int = 0
    without: "Callable[[KernelError], Path] | None" = field(default=None, repr=False)
