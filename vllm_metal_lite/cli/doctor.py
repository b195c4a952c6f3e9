"""`vllm-metal-lite doctor`: examines the machine, and checks and times the kernels.

Prints each part as soon as its result is known.  An error or Ctrl-C (exit code 130) ends the
examination; the report then has the results so far.

Exit code 0: all is well, or there is no GPU and so nothing to check.  1: a kernel is wrong,
launches run out of order, or the kernels give other tokens than the reference.  A slow kernel is
named, and is no reason for 1.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from math import inf
from time import monotonic, perf_counter

from vllm_metal_lite import backend, devices, envs
from vllm_metal_lite.attention.select import no_kernels
from vllm_metal_lite.checks import compare_tokens, isolated, ordering, speed, verdicts
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.for_model import checks_for
from vllm_metal_lite.checks.popular_shapes import COMMON, full_list
from vllm_metal_lite.cli import doctor_report, log, machine, shared_report
from vllm_metal_lite.cli.doctor_report import Report
from vllm_metal_lite.cli.files import check_writable, write_json
from vllm_metal_lite.cli.shared_report import context_that_fits
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import MetalLiteError, one_line
from vllm_metal_lite.model.loader import LoadedModel, load
from vllm_metal_lite.runner.step_peak import step_peak_bytes
from vllm_metal_lite.specs import KernelUse

_BLOCK = 16
Show = Callable[[Iterable[str]], None]  # gets the lines for the user


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

    show(machine.describe(head["machine"]))  # unchanged: a host may have the name "Apple"
    show(doctor_report.describe_memory(report))
    try:
        _examine(report, args, show_found)
    except KeyboardInterrupt:
        report.interrupted = True
        show_found(doctor_report.describe_interrupted(report))
    except Exception as e:
        report.error = one_line(e)
        raise
    finally:
        shared = shared_report.without_names(head | report.as_json(), args.model)
        if args.json:
            print(json.dumps(shared, indent=2))
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
            report.model |= context_that_fits(model, step_peak_bytes)
        show(doctor_report.describe_model(report))
    if model is not None and not backend.is_cpu():
        report.no_kernels = no_kernels(
            "auto", model.attention_shapes, model.packed.by_segment, model.usage.recurrences
        )
    if report.no_kernels:
        show(doctor_report.describe_no_kernels(report))
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
        show(doctor_report.describe_checks(report))
    if not report.problems:
        with _section(report, "bandwidth", "measuring the memory's speed"):
            report.copy_bytes_per_second = speed.copy_bandwidth()
        show(doctor_report.describe_bandwidth(report))
    # A kernel that hangs or ends its process would do the same in the graph of launches.
    if not any(result.ended for result in report.checks):
        with _section(report, "ordering", "checking the order of launches"):
            report.ordering = list(ordering.stress())
    show(doctor_report.describe_order(report))
    with _section(report, "answers", "comparing answers"):
        try:
            report.answers = compare_tokens.compare(
                model, LLMEngine, lambda what: log.progress(f"doctor: comparing: {what}")
            )
        except MetalLiteError as e:  # too little memory
            report.not_compared = one_line(e)
    show(doctor_report.describe_answers(report))
    show(doctor_report.describe_verdict(report))


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
