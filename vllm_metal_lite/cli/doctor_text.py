"""The report of `doctor` for people: short lines, and for each bad one what to do next."""

from collections.abc import Iterator

from vllm_metal_lite.cli.doctor_report import Report
from vllm_metal_lite.errors import size_text
from vllm_metal_lite.kernels.registry import REGISTRY

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
