"""One check, run in this process."""

from contextlib import suppress
from dataclasses import replace
from importlib import import_module

from vllm_metal_lite.checks import speed
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.result import CheckResult
from vllm_metal_lite.errors import one_line
from vllm_metal_lite.kernels.registry import REGISTRY


def run(check: Check, timed: bool = False) -> CheckResult:
    """timed: also time the kernel beside what replaces it, if it is right."""
    module, function = REGISTRY[check.kernel].check.split(".")
    try:
        checks = import_module(f"vllm_metal_lite.checks.{module}")
        error, tolerance = getattr(checks, function)(check)
    except Exception as e:  # from a compiler or a driver
        return CheckResult(check, failure=one_line(e))
    result = CheckResult(check, error, tolerance)
    if timed and result.passed:
        with suppress(Exception):  # such as too little memory, beside a model that fills it
            return replace(result, speed=speed.measure(check))
    return result
