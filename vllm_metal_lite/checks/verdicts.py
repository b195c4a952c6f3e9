"""Checks the kernels for a model, and remembers the results across processes.

For this device, MLX version and kernel source, this module remembers each pass with its times, and
each kernel that hung or ended its process, because another try may cost the whole deadline.  Other
failures, also of the timing, are tried again at each start.

Without a time, prompts use MLX's SDPA, which Apple tunes for each Mac.  Other correct kernels stay:
what replaces them copies K and V, and a timing fails most often because memory is short.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence

from vllm_metal_lite import backend
from vllm_metal_lite.checks import isolated
from vllm_metal_lite.checks.check import Check, CheckResult, Speed
from vllm_metal_lite.checks.for_model import checks_for
from vllm_metal_lite.kernels.findings import Findings
from vllm_metal_lite.kernels.registry import REGISTRY, Verdict
from vllm_metal_lite.specs import KernelUse

logger = logging.getLogger(__name__)


def verify(use: KernelUse) -> Verdict:
    """Check the kernels that a model uses, except where the result is known."""
    found, checks = Findings(), checks_for(use)
    known = [result for check in checks if (result := _recall(found, check)) is not None]
    recalled = {result.check for result in known}
    unknown = [check for check in checks if check not in recalled]
    results = [*known, *(_run(unknown, known) if unknown else ())]
    again = f"found at an earlier start; to try again, delete {found.file}"
    remember([result for result in results if result.check not in recalled], found)
    return _verdict(use, results, dict.fromkeys(recalled, f" ({again})"))


def remember(results: Sequence[CheckResult], found: Findings | None = None) -> None:
    """Keep results for later starts.  results: they come from checks that timed kernels."""
    found = found or Findings()
    for result in results:
        if (result.passed and not result.timing_failed) or result.ended:
            fields = {**vars(result), "speed": result.speed and vars(result.speed)}
            del fields["check"]
            found.add(repr(result.check), json.dumps(fields))


def _run(checks: Sequence[Check], known: Sequence[CheckResult]) -> list[CheckResult]:
    start = time.perf_counter()
    # Without a GPU, kernels run only in tests, where timing means nothing.
    results = list(isolated.results(checks, _report, timed=not backend.is_cpu(), known=known))
    seconds = time.perf_counter() - start
    logger.info(f"{len(checks)} checks of kernels took {seconds:.1f} s")
    return results


def _report(done: int, total: int, check: Check) -> None:
    # The command line shows such a line until the next one.
    logger.info(
        f"checking the kernels, once on this machine: {done + 1} of {total}, {check.kernel}",
        extra={"transient": True},
    )


def _recall(found: Findings, check: Check) -> CheckResult | None:
    try:
        fields = json.loads(found.known[repr(check)])
        speed = fields.pop("speed")
        return CheckResult(check, **fields, speed=speed and Speed(**speed))
    except (ValueError, TypeError, LookupError, AttributeError):  # unknown, or from another version
        return None


def _verdict(
    use: KernelUse, results: Sequence[CheckResult], remarks: Mapping[Check, str]
) -> Verdict:
    """remarks: check -> text that is appended to the message of its failure."""
    failures: dict[str, str] = {}
    varlen = 0  # the number of shapes whose prompts the kernel computes faster
    for result in results:
        speed, remark = result.speed, remarks.get(result.check, "")
        if not result.passed:
            failures.setdefault(result.kernel, f"{result}{remark}")
        elif REGISTRY[result.kernel].prefill == "varlen":
            varlen += not result.timing_failed and (speed is None or speed.ratio <= 1)
            if result.timing_failed:
                logger.warning(f"{result.check} is not used for prompts: it cannot be timed")
        elif speed is not None and speed.is_slow:
            failures.setdefault(result.kernel, f"{result.check}: {speed}{remark}")
    return Verdict(failures, "varlen" if varlen == len(use.shapes) else "gather")
