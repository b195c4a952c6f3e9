"""All checks by kernel, and one of them run in this process."""

from contextlib import suppress
from dataclasses import replace

from vllm_metal_lite.checks import expertcheck, fusedcheck, recurrentcheck, selfcheck, speed
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.result import CheckResult
from vllm_metal_lite.errors import one_line

_CHECKS = selfcheck.CHECKS, fusedcheck.CHECKS, expertcheck.CHECKS, recurrentcheck.CHECKS
# Every kernel of metal/, and every form of one that is checked, and gives way, by itself.
# latent_prefill is a use of latent_attention, with the same text.
KERNELS = tuple(sorted({name for of in _CHECKS for name in of} - {"latent_prefill"}))


def run(check: Check, timed: bool = False) -> CheckResult:
    """timed: also time the kernel beside its next best way, if it is right."""
    checks = selfcheck.CHECKS if check.rotation is None and not check.sizes else fusedcheck.CHECKS
    try:
        error, tolerance = (expertcheck.CHECKS | recurrentcheck.CHECKS | checks)[check.kernel](
            check
        )
    except Exception as e:  # from a compiler or a driver
        return CheckResult(check, failure=one_line(e))
    result = CheckResult(check, error, tolerance)
    if timed and result.passed:
        with suppress(Exception):  # such as too little memory, beside a model that fills it
            return replace(result, speed=speed.measure(check))
    return result
