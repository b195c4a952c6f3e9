"""`vllm-metal-lite doctor`: examines the machine, and checks and times the kernels.

Prints each part as soon as its result is known.  An error or Ctrl-C (exit code 130) ends the
examination; the report then has the results so far.

Exit code 0: all is well, or there is no GPU and so nothing to check.  1: a kernel is wrong,
launches run out of order, or the kernels give other tokens than the reference.  A slow kernel is
named, and is no reason for 1.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from math import inf
from time import monotonic, perf_counter
from typing import Any

from vllm_metal_lite import backend, devices, envs
from vllm_metal_lite.attention.select import no_kernels
from vllm_metal_lite.checks import compare_tokens, isolated, ordering, speed, verdicts
from vllm_metal_lite.checks.check import Check, CheckResult
from vllm_metal_lite.checks.for_model import checks_for
from vllm_metal_lite.checks.ordering import Outcome
from vllm_metal_lite.checks.popular_shapes import COMMON, full_list
from vllm_metal_lite.cli import log, shared_report
from vllm_metal_lite.cli.files import check_writable, report_text, write_json
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import MetalLiteError, one_line, size_text
from vllm_metal_lite.kernels.registry import REGISTRY
from vllm_metal_lite.model.loader import LoadedModel, load
from vllm_metal_lite.runner.step_peak import step_peak_bytes
from vllm_metal_lite.specs import KernelUse

_BLOCK = 16
_SEND = "please open an issue with the file of `vllm-metal-lite doctor --report report.json`"
Show = Callable[[Iterable[str]], None]  # gets the lines for the user


@dataclass
class Report:
    """Field names are also the JSON keys.

    no_kernels: why no kernel is checked.  model: the model's facts, and the context that fits.
    not_tried: the number of checks for which there was no time.  of_checks: all checks.
    not_compared: why no answers were compared.  error: why doctor failed.
    seconds: how long each part took, by its name.
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
    answers: compare_tokens.Comparison | None = None
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
    speed = result.speed and asdict(result.speed)
    text = {"kernel": result.kernel, "check": str(result.check), "passed": result.passed}
    return {**vars(result), **text, "speed": speed}


def run(args: argparse.Namespace) -> int:
    """Run the command `doctor`."""
    if args.report is not None:
        check_writable(args.report, replaces=False)
    folder = next(p for p in (envs.cache_folder(), *envs.cache_folder().parents) if p.is_dir())
    head = shared_report.new_report("doctor")
    report = Report(
        engine_memory_bytes=int(backend.memory_limit() * devices.profile().memory_fraction),
        free_disk_bytes=shutil.disk_usage(folder).free,
        no_kernels="there is no GPU, or MLX does not use it" if backend.is_cpu() else None,
    )

    def show(lines: Iterable[str]) -> None:
        log.clear()
        for line in () if args.json else lines:
            print(line, flush=True)

    def show_found(lines: Iterable[str]) -> None:
        show(shared_report.without_names(list(lines), args.model))

    # Names are not removed from these lines: a host may have the name "Apple".
    show(shared_report.describe_machine(head["machine"]))
    used, disk = map(size_text, (report.engine_memory_bytes, report.free_disk_bytes))
    purpose = "weights, steps, K and V"
    show([f"Memory:    the engine would use {used} of it for {purpose}; {disk} of disk is free"])
    try:
        _examine(report, args, show_found)
    except KeyboardInterrupt:
        report.interrupted = True
        problems = (f"  {problem}" for problem in report.problems)
        show_found(["", "Verdict:   interrupted; the results so far are above", *problems])
    except Exception as e:
        report.error = one_line(e)
        raise
    finally:
        shared = shared_report.without_names(head | report.as_json(), args.model)
        if args.json:
            print(report_text(shared))
        if args.report is not None:
            write_json(args.report, shared)
            if not args.json:
                print(f"Report:    written to {args.report}; attach it to an issue, as it is")
    return 130 if report.interrupted else int(bool(report.problems))


def _examine(report: Report, args: argparse.Namespace, show: Show) -> None:
    """Fill the report, and show each part as soon as it is known.  The subject is a model, or
    the demo and the shapes that most models have."""
    model = None
    if args.model is not None:
        with _section(report, "model", f"loading {args.model}"):
            model = load(args.model)
            report.model = shared_report.model_facts(args.model, model)
            report.model |= shared_report.context_that_fits(model, step_peak_bytes)
        show(_describe_model(report))
    if model is not None and not backend.is_cpu():
        report.no_kernels = no_kernels(
            "auto", model.attention_shapes, model.packed.by_segment, model.usage.recurrences
        )
    if report.no_kernels:
        show([f"Kernels:   not checked: {report.no_kernels}"])
        show(["Verdict:   the reference attention is used; there is nothing else to check"])
    else:
        _examine_kernels(report, args, show, model)


def _examine_kernels(
    report: Report, args: argparse.Namespace, show: Show, model: LoadedModel | None
) -> None:
    common = [] if model is not None else list(COMMON.values())
    model = model or load("demo")
    own = checks_for(model.kernel_use(_BLOCK))
    try:
        with _section(report, "checks", "checking the kernels"):
            _run_checks(report, own, common, args)
    finally:
        verdicts.remember([result for result in report.checks if result.check in own])
        show(_describe_checks(report))
    if not report.problems:
        with _section(report, "bandwidth", "measuring the memory's speed"):
            report.copy_bytes_per_second = speed.copy_bandwidth()
        gigabytes = report.copy_bytes_per_second / 1e9
        show(["", f"Bandwidth: a copy moves {gigabytes:,.0f} GB/s"])
    # A kernel that hangs or ends its process would do the same in the graph of launches.
    if not any(result.ended for result in report.checks):
        with _section(report, "ordering", "checking the order of launches"):
            report.ordering = list(ordering.stress())
    show(_describe_order(report))
    with _section(report, "answers", "comparing answers"):
        try:
            report.answers = compare_tokens.compare(
                model, LLMEngine, lambda what: log.progress(f"doctor: comparing: {what}")
            )
        except MetalLiteError as e:  # too little memory
            report.not_compared = one_line(e)
    show(_describe_answers(report))
    show(_describe_verdict(report))


@contextmanager
def _section(report: Report, name: str, title: str) -> Iterator[None]:
    """Announce a part, and note how long it takes."""
    if not sys.stderr.isatty():
        print(f"doctor: {title}", file=sys.stderr, flush=True)
    log.progress(f"doctor: {title}")
    start = perf_counter()
    try:
        yield
    finally:
        report.seconds[name] = round(perf_counter() - start, 1)


def _run_checks(
    report: Report, own: Sequence[Check], common: Sequence[KernelUse], args: argparse.Namespace
) -> None:
    """Run checks while there is time: first, and timed, a model's own and those of the first common
    use; then all others."""
    end = monotonic() + (inf if args.full else args.seconds)
    first = dict.fromkeys([*own, *(c for use in common[:1] for c in checks_for(use))])
    rest = [*common[1:], *(full_list() if args.full else [])]
    more = dict.fromkeys(c for u in rest for c in checks_for(u) if c not in first)
    report.not_tried = report.of_checks = len(first) + len(more)

    def progress(_: int, __: int, check: Check) -> None:
        report.not_tried -= 1
        reached = report.of_checks - report.not_tried
        log.progress(f"doctor: checking kernels: {reached} of {report.of_checks}, {check}")

    for checks, timed in ((list(first), True), (list(more), False)):
        known = tuple(report.checks)
        with closing(isolated.results(checks, progress, timed=timed, known=known)) as running:
            while monotonic() < end and (result := next(running, None)) is not None:
                report.checks.append(result)


# The text for people: short lines, and for each bad one what to do next


def _describe_model(report: Report) -> Iterator[str]:
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


def _describe_checks(report: Report) -> Iterator[str]:
    """One line for each kernel, the checks that failed, and how many were not tried."""
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


def _describe_order(report: Report) -> Iterator[str]:
    yield ""
    if not report.ordering:
        yield "Order:     not checked, because a kernel hangs or ends its process"
    for outcome in report.ordering:
        if outcome.problem:
            yield f"Order:     WRONG, {outcome.buffers}: {outcome.problem}"
        else:
            yield f"Order:     ordered: all {outcome.reads} reads are right, {outcome.buffers}"


def _describe_answers(report: Report) -> Iterator[str]:
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


def _describe_verdict(report: Report) -> Iterator[str]:
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
