"""The report of `doctor` for people: short lines, and for each bad one what to do next."""

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any

from vllm_metal_lite.cli import machine
from vllm_metal_lite.cli.machine import Report
from vllm_metal_lite.errors import size_text
from vllm_metal_lite.kernels.registry import REGISTRY

_SEND = "please open an issue with the file of `vllm-metal-lite doctor --report report.json`"
_FASTER = f"The engine uses the fallback where that is faster; {_SEND}"


# A part of the text, from the report as far as it is known.
Part = Callable[[Report], Iterable[str]]


def describe_machine(report: Report) -> Iterator[str]:
    yield from machine.describe(report["machine"])
    used, disk = report["engine_memory_bytes"], report["free_disk_bytes"]
    yield (
        f"Memory:    the engine would use {size_text(used)} of it for weights, steps, K and V; "
        f"{size_text(disk)} of disk are free"
    )


def describe_model(report: Report) -> Iterator[str]:
    model = report["model"]
    yield (
        f"Model:     {model['name']}: {model['type']}, {size_text(model['weight_bytes'])}, "
        f"computes in {model['dtype']}"
    )
    if model["problem"]:
        yield f"Context:   {model['problem']}"
    else:
        yield (
            f"Context:   {model['max_model_len']:,} tokens; the KV store would hold "
            f"{model['kv_store_tokens']:,} ({size_text(model['kv_store_bytes'])})"
        )


def describe_no_kernels(report: Report) -> list[str]:
    return [
        f"Kernels:   not checked: {report['no_kernels']}",
        "Verdict:   the reference attention serves everything here; nothing else to check",
    ]


def describe_checks(report: Report) -> Iterator[str]:
    """A line a kernel, the checks that failed, and how many were not tried."""
    checks = report["checks"]
    yield ""
    for kernel in dict.fromkeys(check["kernel"] for check in checks):
        own = [check for check in checks if check["kernel"] == kernel]
        wrong = [check for check in own if not check["passed"]]
        label = f"{kernel + ':':22}"
        if wrong:
            yield f"{label}WRONG in {len(wrong)} of {len(own)} checks"
            yield from (f"  {_failure(check)}" for check in wrong)
            yield f"  fallback: {REGISTRY[kernel].fallback}"
            continue
        worst = max((c["error"] / c["tolerance"] for c in own if c["tolerance"]), default=0.0)
        text = f"right in {len(own)} checks, worst error {100 * worst:.0f} % of what is allowed"
        times = [c for c in own if c["seconds"]]
        if times:
            slowest = max(times, key=_times_slower)
            ours, other = (1e6 * slowest[key] for key in ("seconds", "alternative_seconds"))
            text += f"; {ours:,.0f} us, its fallback {other:,.0f} us"
        yield label + text
        if any(check["is_slow"] for check in own):
            times_slower = f"{_times_slower(slowest):.1f} times slower"
            yield f"  SLOW: right, and {times_slower} than its fallback"
            yield f"  {_FASTER}"
    left, total = report["not_tried"]["checks"], report["not_tried"]["of_checks"]
    if left:
        yield f"not tried for time: {left} of {total} checks; --full tries all"


def describe_bandwidth(report: Report) -> list[str]:
    return ["", f"Bandwidth: a copy moves {report['copy_bytes_per_second'] / 1e9:,.0f} GB/s"]


def describe_order(report: Report) -> Iterator[str]:
    outcomes = report["ordering"]
    yield ""
    if not outcomes:
        yield "Order:     not checked, because a kernel hangs or ends its process"
    for outcome in outcomes:
        if outcome["problem"]:
            yield f"Order:     WRONG, {outcome['buffers']}: {outcome['problem']}"
        else:
            reads = outcome["reads"]
            yield f"Order:     ordered: all {reads} reads are right, {outcome['buffers']}"


def describe_answers(report: Report) -> Iterator[str]:
    answers = report["answers"]
    if answers["problem"]:
        yield f"Answers:   not compared: {answers['problem']}"
        return
    count = f"{answers['tokens']} tokens in {answers['answers']} answers of {answers['model']}"
    same = "equal" if not answers["differences"] else "equal but for ties"
    verdict = same if answers["agrees"] else "NOT EQUAL"
    yield f"Answers:   {count}, by {answers['path']} and by the reference: {verdict}"
    for d in answers["differences"]:
        kind = "a tie, which rounding decides" if d["is_tie"] else "more than rounding"
        yield (
            f"  answer {d['prompt'] + 1}, token {d['position'] + 1}: {d['by_kernels']} instead of "
            f"{d['by_reference']}, {d['margin']:.3f} standard deviations apart: {kind}"
        )
    yield f"Attention: {answers['path']} ({answers['reason']})"


def describe_verdict(report: Report) -> Iterator[str]:
    yield ""
    slow = any(check["is_slow"] for check in report["checks"])
    if not report["problems"]:
        all_is = "all that was tried is" if report["not_tried"]["checks"] else "all is"
        yield f"Verdict:   {all_is} right{', but something is slow: see above' if slow else ''}"
        return
    yield f"Verdict:   problems: {len(report['problems'])}"
    if any(not check["passed"] for check in report["checks"]):
        yield "  The engine leaves a wrong kernel out by itself, and answers stay right."
    ordered = not any(outcome["problem"] for outcome in report["ordering"])
    answers = report["answers"]
    agrees = answers is None or answers["problem"] or answers["agrees"]
    if not ordered or not agrees:
        yield "  Answers may be wrong with kernels: use `--attention reference`."
    yield f"  Next: {_SEND}"


def describe_interrupted(report: Report) -> list[str]:
    problems = [f"  {problem}" for problem in report["problems"]]
    return ["", "Verdict:   interrupted; the results so far are above", *problems]


def _failure(check: dict[str, Any]) -> str:
    if check["failure"] is not None:
        return f"{check['check']}: {check['failure']}"
    error = inf if check["error"] is None else check["error"]
    return f"{check['check']}: error {error:.2g}, allowed {check['tolerance']:.2g}"


def _times_slower(check: dict[str, Any]) -> float:
    return check["seconds"] / check["alternative_seconds"]
