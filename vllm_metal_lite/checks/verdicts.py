"""Runs the checks for a model, and remembers passed checks across processes.

A pass is remembered for this device, MLX version and kernel source, so the second that checks cost
is spent once.
"""

from collections.abc import Sequence

from vllm_metal_lite import backend
from vllm_metal_lite.attention.paged.attention import PREFILLS
from vllm_metal_lite.attention.select import OPTIONAL_KERNELS, Verdict
from vllm_metal_lite.checks import fusedcheck, measure, selfcheck
from vllm_metal_lite.checks.result import CheckResult
from vllm_metal_lite.kernels.common import unsupported
from vllm_metal_lite.kernels.remembered import Remembered
from vllm_metal_lite.specs import AttentionShape


def verify(shapes: Sequence[AttentionShape], block_size: int) -> Verdict:
    """Check the kernels at the shapes of a model, except where they are known to pass."""
    failures: dict[str, str] = {}
    prefills = []
    for shape in shapes:
        failed, prefill = _own(shape, block_size)
        prefills.append(prefill)
        for result in failed:
            failures.setdefault(result.kernel, str(result))
    # With a failure that has no fallback the reference is used, which fuses nothing.
    fuses = OPTIONAL_KERNELS.issuperset(failures)
    for shape in shapes if fuses else ():
        for result in _fused(shape):
            failures.setdefault(result.kernel, str(result))
    return Verdict(failures, max(prefills, key=PREFILLS.index))


def _own(shape: AttentionShape, block_size: int) -> tuple[list[CheckResult], str]:
    """The failures of `selfcheck.check`, and the faster way for prompts to attend."""
    found = Remembered()
    key = f"{shape}, blocks of {block_size}"
    if key not in found.known:
        failed = [r for r in selfcheck.check(shape, block_size) if not r.passed]
        if failed:
            return failed, "gather"
        # Without a GPU, kernels run only in tests, where timing means nothing.
        if unsupported(shape, prefill=True):
            how = "gather"
        else:
            how = "varlen" if backend.is_cpu() else measure.faster_prefill(shape)
        found.add(key, how)
    return [], found.known[key]


def _fused(shape: AttentionShape) -> list[CheckResult]:
    """The failures of `fusedcheck.check`."""
    found = Remembered()
    key = f"{fusedcheck.heads_only(shape)}, fused"
    if key in found.known:
        return []
    failed = [r for r in fusedcheck.check(shape) if not r.passed]
    if not failed:
        found.add(key, "right")
    return failed
