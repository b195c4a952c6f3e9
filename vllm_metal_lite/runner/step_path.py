"""The path of a model's steps, and the fallback if a kernel of the path fails.

A kernel may fail while serving, because MLX compiles a kernel at its first launch with new types or
sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm_metal_lite.attention.base import Attention
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.select import select
from vllm_metal_lite.kernels.launch import KernelError
from vllm_metal_lite.kernels.registry import Verdict
from vllm_metal_lite.model.packed import NO_FUSION, Fusion
from vllm_metal_lite.specs import AttentionShape


@dataclass(frozen=True)
class StepPath:
    """attention_reason: why this attention was chosen.

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
        """The kernels that fail on this device: their check, or a launch in a step."""
        return tuple(self.verdict.failures)

    def fallback(self, error: KernelError) -> "StepPath":
        """The fallback if a kernel of this path fails, with a warning.

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
