"""`vllm-metal-lite doctor`: examines the machine, and checks and times the kernels.

Each part is printed when it is known, and Ctrl-C keeps the results so far (exit code 130).

Exit code 0: all is well, or there is no GPU and so nothing to check.  1: a kernel is wrong,
launches run out of order, or the kernels give other tokens than the reference.  A slow kernel is
named, and is no reason for 1.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from math import inf, isfinite
from time import monotonic, perf_counter
from typing import Any

from vllm_metal_lite import backend, devices, envs
from vllm_metal_lite.attention.select import no_kernels
from vllm_metal_lite.checks import compare_tokens, isolated, ordering, speed, verdicts
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.for_model import checks_for
from vllm_metal_lite.checks.popular_shapes import COMMON, full_list
from vllm_metal_lite.checks.result import CheckResult
from vllm_metal_lite.cli import doctor_text, log, machine
from vllm_metal_lite.cli.machine import Report
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import MetalLiteError, one_line
from vllm_metal_lite.model.loader import LoadedModel, load
from vllm_metal_lite.runner.memory import size_store, store_bytes
from vllm_metal_lite.specs import KernelUse

_BLOCK = 16
# Prints a part of the text, once the report has its facts.
Show = Callable[[doctor_text.Part], object]


def run(args: argparse.Namespace) -> int:
    """Run the command `doctor`."""
    if args.report is not None:
        machine.check_writable(args.report)
    report = _begin()

    def show(part: doctor_text.Part) -> None:
        """Print a part as soon as it is known."""
        log.clear()
        for line in () if args.json else part(machine.without_names(report, args.model)):
            print(line, flush=True)

    try:
        _examine(report, args, show)
    except KeyboardInterrupt:
        report["interrupted"] = True
        show(doctor_text.describe_interrupted)
    report = machine.without_names(report, args.model)
    if args.json:
        print(json.dumps(report, indent=2))
    if args.report is not None:
        machine.write(args.report, report)
        if not args.json:
            print(f"Report:    written to {args.report}; attach it to an issue, as it is")
    return 130 if report["interrupted"] else int(bool(report["problems"]))


def _examine(report: Report, args: argparse.Namespace, show: Show) -> None:
    """Fill the report, part by part: for a model, or for the demo and the shapes that most models
    have."""
    model = None
    show(doctor_text.describe_machine)
    if args.model is not None:
        with _section(report, "model", f"loading {args.model}"):
            model = load(args.model)
            report["model"] = _describe_model(args.model, model)
        show(doctor_text.describe_model)
    if not backend.is_cpu():
        report["no_kernels"] = model and no_kernels(
            "auto", model.attention_shapes, model.packed.by_segment, model.fit.recurrences
        )
    if report["no_kernels"]:
        show(doctor_text.describe_no_kernels)
        return
    common = [] if model is not None else list(COMMON.values())
    model = model or load("demo")
    own, results = checks_for(model.kernel_use(_BLOCK)), list[CheckResult]()
    try:
        with _section(report, "checks", "checking the kernels"):
            for result in _results(report, own, common, args):
                results.append(result)
                report["checks"].append(_check_as_json(result))
                if not result.passed:
                    report["problems"].append(str(result))
    finally:
        verdicts.remember([result for result in results if result.check in own])
        show(doctor_text.describe_checks)
    if not report["problems"]:
        with _section(report, "bandwidth", "measuring the memory's speed"):
            report["copy_bytes_per_second"] = speed.copy_bandwidth()
        show(doctor_text.describe_bandwidth)
    # A kernel that hangs or ends its process would do the same in the graph of launches.
    if not any(result.ended for result in results):
        with _section(report, "ordering", "checking the order of launches"):
            outcomes = list(ordering.stress())
        report["ordering"] = [asdict(outcome) for outcome in outcomes]
        report["problems"] += [
            f"order of launches, {o.buffers}: {o.problem}" for o in outcomes if o.problem
        ]
    show(doctor_text.describe_order)
    with _section(report, "answers", "comparing answers"):
        _compare_answers(report, model)
    show(doctor_text.describe_answers)
    show(doctor_text.describe_verdict)


@contextmanager
def _section(report: Report, name: str, title: str) -> Iterator[None]:
    """Notes how many seconds a part takes."""
    if not sys.stderr.isatty():
        print(f"doctor: {title}", file=sys.stderr, flush=True)
    _say(title)
    start = perf_counter()
    try:
        yield
    finally:
        report["seconds"][name] = round(perf_counter() - start, 1)


def _results(
    report: Report, own: Sequence[Check], common: Sequence[KernelUse], args: argparse.Namespace
) -> Iterator[CheckResult]:
    """Run checks while there is time: a model's own and those of the first common use first, with
    times."""
    end = monotonic() + (inf if args.full else args.seconds)
    first = dict.fromkeys([*own, *(c for use in common[:1] for c in checks_for(use))])
    rest = [*common[1:], *(full_list() if args.full else [])]
    more = dict.fromkeys(c for u in rest for c in checks_for(u) if c not in first)
    total, reached = len(first) + len(more), 0

    def progress(_: int, __: int, check: Check) -> None:
        nonlocal reached
        reached += 1
        _say(f"checking kernels: {reached} of {total}, {check}")

    known: list[CheckResult] = []
    for checks, timed in ((list(first), True), (list(more), False)):
        before = tuple(known)
        with closing(isolated.results(checks, progress, timed=timed, known=before)) as running:
            while monotonic() < end and (result := next(running, None)) is not None:
                known.append(result)
                yield result
    report["not_tried"] = {"checks": total - reached, "of_checks": total}


def _compare_answers(report: Report, model: LoadedModel) -> None:
    try:
        found = compare_tokens.compare(model, lambda what: _say(f"comparing: {what}"))
    except MetalLiteError as e:  # too little memory
        report["answers"] = {"model": None, "problem": one_line(e)}
        report["problems"].append(f"answers: {one_line(e)}")
        return
    name = report["model"]["name"] if report["model"] else "demo"
    more = {"model": name, "problem": None, "agrees": found.agrees}
    report["answers"] = {**asdict(found), **more}
    if not found.agrees:
        count = sum(not d.is_tie for d in found.differences)
        report["problems"].append(
            f"answers: {count} of {found.answers} differ from the reference's by more than rounding"
        )


def _begin() -> Report:
    """A report with the facts that need no measurement.  problems: reasons for exit code 1."""
    profile = devices.profile()
    folder = next(p for p in (envs.cache_folder(), *envs.cache_folder().parents) if p.is_dir())
    return machine.new_report("doctor") | {
        "model": None,
        "engine_memory_bytes": int(backend.memory_limit() * profile.memory_fraction),
        "free_disk_bytes": shutil.disk_usage(folder).free,
        "profile": {"constants": asdict(profile)},
        "no_kernels": "there is no GPU, or MLX does not use it" if backend.is_cpu() else None,
        "checks": [],
        "not_tried": {"checks": 0, "of_checks": 0},
        "interrupted": False,
        "copy_bytes_per_second": None,
        "ordering": [],
        "answers": None,
        "problems": [],
        "seconds": {},
    }


def _describe_model(name: str, model: LoadedModel) -> dict[str, Any]:
    """The model's size, and the context and store that it gets with default options."""
    config = EngineConfig()
    described: dict[str, Any] = {
        "name": machine.public_name(name),
        "type": model.model_type,
        "dtype": backend.dtype_name(model.dtype),
        "weight_bytes": model.weight_bytes,
        "max_model_len": None,
        "kv_store_tokens": None,
        "problem": None,
    }
    try:
        groups, described["max_model_len"], slots = size_store(model, config)
        described["state_bytes"] = slots * model.state_bytes
        described["kv_store_bytes"] = store_bytes(model, groups, config.block_size)
        described["kv_store_tokens"] = groups[0].num_blocks * config.block_size
    except MetalLiteError as e:  # too little memory
        described["problem"] = one_line(e)
    return described


def _check_as_json(result: CheckResult) -> dict[str, Any]:
    speed = result.speed
    return {
        "kernel": result.kernel,
        "check": str(result.check),
        "error": result.error if isfinite(result.error) else None,  # JSON has no infinity
        "tolerance": result.tolerance,
        "passed": result.passed,
        "failure": result.failure,
        "seconds": speed and speed.seconds,
        "alternative_seconds": speed and speed.fallback_seconds,
        "is_slow": bool(speed and speed.is_slow),
    }


def _say(what: str) -> None:
    log.progress(f"doctor: {what}")
