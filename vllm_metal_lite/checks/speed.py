"""Times a kernel beside its next best way, at the shape of a check."""

from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.result import Speed


def measure(check: Check) -> Speed | None:
    """None if the kernel has no alternative to compare with."""
    return None
