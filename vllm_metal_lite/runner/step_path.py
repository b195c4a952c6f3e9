"""The path of a model's steps, and the fallback if a kernel of the path fails.

A kernel may fail while serving, because MLX compiles a kernel at its first launch with new types or
sizes.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_metal_lite.attention.base import Attention
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.select import select
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import KernelError, one_by_one
from vllm_metal_lite.kernels.registry import Verdict
from vllm_metal_lite.model.packed import NO_FUSION, Fusion
from vllm_metal_lite.specs import AttentionShape

# MLX has no type for this error.  The words must not match a compiler's messages about memory.
_OUT_OF_MEMORY = re.compile(
    r"malloc\]|(unable|attempting) to allocate|out ?of ?memory|insufficient memory", re.IGNORECASE
)


@dataclass(frozen=True)
class StepPath:
    """How the steps of a model run: which attention, and what is fused.

    attention_reason: why this attention was chosen.
    option, shapes, verdict: the arguments of `attention.select` that led to this attention.
    """

    attention: Attention
    attention_reason: str = ""
    option: str = "auto"
    shapes: Sequence[AttentionShape] = ()
    verdict: Verdict = field(default_factory=lambda: Verdict({}))
    fusion: Fusion = NO_FUSION

    @property
    def reason(self) -> str:
        """Why this attention was chosen, and which operations are fused."""
        return self.attention_reason + self.fusion.note

    @property
    def uses_kernels(self) -> bool:
        return isinstance(self.attention, KernelAttention)

    @property
    def failed_kernels(self) -> tuple[str, ...]:
        """The kernels whose check failed on this device, or that failed in a step."""
        return tuple(self.verdict.failures)

    def fallback(self, error: KernelError) -> "StepPath":
        """The path to use after a kernel of this path has failed.  Logs a warning.

        Raises ConfigError if only the reference is left and the option forbids it.
        """
        kernel, known = error.kernel, self.verdict.failures
        line = f"{kernel} fails in a step: {error.why}"
        verdict = replace(self.verdict, failures={**known, kernel: line})
        attention, reason = select(
            self.option,
            self.attention.store,
            self.shapes,
            verdict,
            known=known.keys() - {kernel},
            fatal=kernel if kernel in known else None,
        )
        path = replace(self, attention=attention, attention_reason=reason, verdict=verdict)
        fusion = self.fusion.without(path.failed_kernels) if path.uses_kernels else NO_FUSION
        return replace(path, fusion=fusion)


def is_out_of_memory(error: Exception | str) -> bool:
    return _OUT_OF_MEMORY.search(str(error)) is not None


def kernel_at_fault(again: Callable[[], Any]) -> KernelError | None:
    """Build the forward of a failed step again, launch by launch; return the error of the kernel
    that fails.

    again: builds the forward.  None: no kernel is at fault, or memory ran out.
    """
    mx.synchronize()  # launches of the failed step may still run
    try:
        with one_by_one():
            again()
    except KernelError as e:
        return None if is_out_of_memory(e.why) else e
    except Exception:  # the error is not a kernel's
        return None
    finally:
        mx.synchronize()  # the step's repetition writes the same rows
    return None
