"""The report of `doctor`: its findings, their JSON for issues, and their text for people.

The text has short lines, and for each bad one what to do next.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from vllm_metal_lite import devices
from vllm_metal_lite.checks.check import CheckResult
from vllm_metal_lite.checks.compare_tokens import Comparison
from vllm_metal_lite.checks.ordering import Outcome
from vllm_metal_lite.errors import size_text
from vllm_metal_lite.kernels.registry import REGISTRY


@dataclass
class Report:
    """Field names are also the JSON keys.

    no_kernels: why no kernel is checked.  model: its facts, and the context that fits.
    not_tried: checks for which there was no time.  of_checks: all checks.
    not_compared: why there are no answers.  error: why doctor failed.  seconds: time of each part.
    """

    engine_memory_bytes: int
    free_disk_bytes: int
    no_kernels: str | None
    model: dict[str, Any] | None = None
    checks: list[CheckResult] = field(default_factory=list)
    not_tried: int = 0
    of_checks: int = 0
    copy_bytes_per_second: float | None = None
    ordering: list[Outcome] = field(default_factory=list)
    answers: Comparison | None = None
    not_compared: str | None = None
    interrupted: bool = False
    error: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """Reasons for exit code 1."""
        found = [str(result) for result in self.checks if not result.passed]
        found += [
            f"order of launches, {o.buffers}: {o.problem}" for o in self.ordering if o.problem
        ]
        if self.answers and not self.answers.agrees:
            wrong = sum(not d.is_tie for d in self.answers.differences)
            found.append(
                f"answers: {wrong} of {self.answers.answers} differ from the reference's by more "
                "than rounding"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "profile": {"constants": asdict(devices.profile())},
            "checks": list(map(_check_as_json, self.checks)),
            "ordering": list(map(asdict, self.ordering)),
            "answers": self.answers and asdict(self.answers),
            "problems": self.problems,
        }


def _check_as_json(result: CheckResult) -> dict[str, Any]:
    error = result.error if isfinite(result.error) else None  # JSON has no infinity
    speed = result.speed and asdict(result.speed)
    text = {"kernel": result.kernel, "check": str(result.check), "passed": result.passed}
    return {**vars(result), **text, "error": error, "speed": speed}


_SEND = "please open an issue with the file of `vllm-metal-lite doctor --report report.json`"


def describe_memory(report: Report) -> list[str]:
    used, disk = map(size_text, (report.engine_memory_bytes, report.free_disk_bytes))
    return [
        f"Memory:    the engine would use {used} of it for weights, steps, K and V; {disk} of disk "
        "is free"
    ]


def describe_model(report: Report) -> Iterator[str]:
    model = report.model
    assert model is not None
    yield (
        f"Model:     {model['name']}: {model['type']}, {size_text(model['weight_bytes'])}, "
        f"computes in {model['dtype']}"
    )
    if problem := model.get("memory_problem"):
        yield f"Context:   does not fit: {problem}"
    else:
        yield (
            f"Context:   {model['max_model_len']:,} tokens; the KV store would hold "
            f"{model['num_tokens']:,} ({size_text(model['kv_store_bytes'])})"
        )


def describe_no_kernels(report: Report) -> list[str]:
    return [
        f"Kernels:   not checked: {report.no_kernels}",
        "Verdict:   the reference attention is used; there is nothing else to check",
    ]


def describe_checks(report: Report) -> Iterator[str]:
    """A line a kernel, the checks that failed, and how many were not tried."""
    yield ""
    for kernel in dict.fromkeys(result.kernel for result in report.checks):
        own = [result for result in report.checks if result.kernel == kernel]
        wrong = [result for result in own if not result.passed]
        label = f"{kernel + ':':22}"
        if wrong:
            yield f"{label}WRONG in {len(wrong)} of {len(own)} checks"
            yield from (f"  {result}" for result in wrong)
            yield f"  fallback: {REGISTRY[kernel].fallback}"
            continue
        largest = max(result.error for result in own)
        text = f"right in {len(own)} checks, largest error {100 * largest:.0f} % of the tolerance"
        speeds = [result.speed for result in own if result.speed]
        slowest = max(speeds, key=lambda speed: speed.ratio, default=None)
        if slowest:
            ours, other = 1e6 * slowest.seconds, 1e6 * slowest.fallback_seconds
            text += f"; {ours:,.0f} us, its fallback {other:,.0f} us"
        yield label + text
        if slowest and any(speed.is_slow for speed in speeds):
            yield f"  SLOW: right, and {slowest.ratio:.1f} times slower than its fallback"
            yield f"  The engine uses the fallback where that is faster; {_SEND}"
    if report.not_tried:
        yield f"not tried: {report.not_tried} of {report.of_checks} checks; --full tries all"


def describe_bandwidth(report: Report) -> list[str]:
    return ["", f"Bandwidth: a copy moves {(report.copy_bytes_per_second or 0) / 1e9:,.0f} GB/s"]


def describe_order(report: Report) -> Iterator[str]:
    yield ""
    if not report.ordering:
        yield "Order:     not checked, because a kernel hangs or ends its process"
    for outcome in report.ordering:
        if outcome.problem:
            yield f"Order:     WRONG, {outcome.buffers}: {outcome.problem}"
        else:
            yield f"Order:     ordered: all {outcome.reads} reads are right, {outcome.buffers}"


def describe_answers(report: Report) -> Iterator[str]:
    answers = report.answers
    if answers is None:
        yield f"Answers:   not compared: {report.not_compared}"
        return
    model = report.model["name"] if report.model else "demo"
    count = f"{answers.tokens} tokens in {answers.answers} answers of {model}"
    same = "equal but for ties" if answers.differences else "equal"
    verdict = same if answers.agrees else "NOT EQUAL"
    yield f"Answers:   {count}, by {answers.path} and by the reference: {verdict}"
    for d in answers.differences:
        kind = "a tie, which rounding decides" if d.is_tie else "more than rounding"
        yield (
            f"  answer {d.prompt + 1}, token {d.position + 1}: {d.by_kernels} instead of "
            f"{d.by_reference}, {d.margin:.3f} standard deviations apart: {kind}"
        )
    yield f"Attention: {answers.path} ({answers.reason})"


def describe_verdict(report: Report) -> Iterator[str]:
    yield ""
    if not report.problems:
        slow = any(result.speed and result.speed.is_slow for result in report.checks)
        partly = report.not_tried or report.not_compared
        what = "everything that was tried" if partly else "everything"
        yield f"Verdict:   {what} is right{', but a kernel is slow: see above' if slow else ''}"
        return
    yield f"Verdict:   problems: {len(report.problems)}"
    if any(not result.passed for result in report.checks):
        yield "  The engine uses the fallback of a wrong kernel, so answers stay right."
    ordered = not any(outcome.problem for outcome in report.ordering)
    agrees = report.answers is None or report.answers.agrees
    if not ordered or not agrees:
        yield "  Answers may be wrong with kernels: use `--attention reference`."
    yield f"  Next: {_SEND}"


def describe_interrupted(report: Report) -> list[str]:
    problems = [f"  {problem}" for problem in report.problems]
    return ["", "Verdict:   interrupted; the results so far are above", *problems]
