"""The result of checking one kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import one_line
from vllm_metal_lite.specs import AttentionShape

# Largest |kernel - reference| / (1 + |reference|).  The reference computes in float32 from the same
# rounded inputs; a kernel rounds its result, and in prompts also the weights, to the type.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class CheckResult:
    """One kernel at one shape: the largest error and the tolerance, or why the kernel did not run.

    block_size: 0 if blocks do not matter.
    """

    kernel: str
    shape: AttentionShape
    block_size: int
    error: float
    tolerance: float
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None and self.error <= self.tolerance

    def __str__(self) -> str:
        blocks = f", blocks of {self.block_size}" if self.block_size else ""
        what = f"{self.kernel} ({self.shape}{blocks})"
        if self.failure is not None:
            return f"{what}: {self.failure}"
        return f"{what}: error {self.error:.2g}, allowed {self.tolerance:.2g}"


def run_checks(
    checks: dict[str, Callable[[], tuple[float, float]]], shape: AttentionShape, block_size: int
) -> list[CheckResult]:
    """Run functions, by kernel, that return (error, tolerance) or raise."""
    results = []
    for kernel in checks:
        try:
            error, tolerance = checks[kernel]()
            results.append(CheckResult(kernel, shape, block_size, error, tolerance))
        except Exception as e:  # from a compiler or a driver
            results.append(CheckResult(kernel, shape, block_size, np.inf, 0.0, one_line(e)))
    return results


def largest_error(got: mx.array, expected: np.ndarray, allowed: np.ndarray | None = None) -> float:
    """The largest |got - expected| / allowed where `expected` is finite; NaN counts as infinite.

    allowed: by default 1 + |expected|.
    """
    values = np.array(got.astype(mx.float32), np.float64)
    if values.shape != expected.shape:
        raise ValueError(f"shape {values.shape} instead of {expected.shape}")
    wanted = np.isfinite(expected)
    allowed = 1 + np.abs(expected) if allowed is None else allowed
    error = np.abs(values[wanted] - expected[wanted]) / allowed[wanted]
    return float(np.nan_to_num(error, nan=np.inf).max(initial=0.0))
