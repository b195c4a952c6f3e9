"""`vllm-metal-lite doctor`: examines this machine; checks, times and tunes the kernels.

Exit code 0: all is well, or there is no GPU and so nothing to check.  1: a kernel is wrong,
launches run out of order, or the kernels give other tokens than the reference.  A slow kernel is
named, and is no reason for 1.
"""

import argparse
import json
import logging
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from vllm_metal_lite import backend, devices, envs, tuned
from vllm_metal_lite.attention.select import no_kernels
from vllm_metal_lite.checks import floors, generation, isolated, ordering, tune_device, tuning
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.common import COMMON
from vllm_metal_lite.checks.fusedcheck import full_list as full_fused_list
from vllm_metal_lite.checks.plan import checks_for
from vllm_metal_lite.checks.result import CheckResult
from vllm_metal_lite.checks.selfcheck import full_list
from vllm_metal_lite.cli import doctor_text, log, machine
from vllm_metal_lite.cli.machine import Report
from vllm_metal_lite.cli.options import UsageError
from vllm_metal_lite.cli.wrap import wrap
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import MetalLiteError, one_line
from vllm_metal_lite.model.loader import LoadedModel, load
from vllm_metal_lite.runner.memory import size_store, store_bytes
from vllm_metal_lite.specs import AttentionShape, KernelUse

logger = logging.getLogger(__name__)

_BLOCK = 16

Outcome = Sequence[CheckResult]


def run(args: argparse.Namespace) -> int:
    """Run the command `doctor`."""
    if args.reset and not args.tune:
        raise UsageError("--reset goes with --tune: it removes the constants that --tune measured")
    if args.tune and args.model:
        raise UsageError("--tune measures the device and takes no model")
    if args.report is not None:
        machine.check_writable(args.report)
    with log.progress():
        report = _tune(args.reset) if args.tune else examine(args.model, args.full)
    report = _without_names(report, args.model)
    text = json.dumps(report, indent=2) if args.json else "\n".join(doctor_text.describe(report))
    print(text if args.json else wrap(text, sys.stdout))
    if args.report is not None:
        machine.write(args.report, report)
        if not args.json:
            print(f"Report:    written to {args.report}; attach it to an issue, as it is")
    return 1 if report["problems"] else 0


def examine(name: str | None, full: bool) -> Report:
    """The report.  name: of a model; None: the shapes that most models have, and the demo model.
    full: many more shapes."""
    report = _begin()
    model = None
    if name is not None:
        with _section(report, "model", f"loading {name}"):
            model = load(name)
            report["model"] = _describe_model(name, model)
    if backend.is_cpu():
        return report
    why_not = model and no_kernels("auto", model.attention_shapes, model.packed.by_segment)
    report["no_kernels"] = why_not
    if why_not:
        return report
    if model is None:
        model = load("demo")
        use, *others = *COMMON.values(), model.kernel_use(_BLOCK)
    else:
        use, others = model.kernel_use(_BLOCK), []
    with _section(report, "checks", "checking the kernels"):
        results = _check(use, others, full)
        report["checks"] = [_check_as_json(result) for result in results]
    report["problems"] += [str(result) for result in results if not result.passed]
    if not report["problems"]:
        _examine_speed(report, use.shapes[0])
    _examine_order(report, results)
    _examine_answers(report, model)
    return report


def _begin() -> Report:
    """A report with what is known without a measurement.  problems: what exit code 1 is for."""
    report = machine.new_report("doctor")
    profile, limit = devices.profile(), backend.memory_limit()
    constants = {f.name: getattr(profile, f.name) for f in fields(profile) if f.name != "tuned"}
    folder = next(p for p in (envs.cache_folder(), *envs.cache_folder().parents) if p.is_dir())
    report |= {
        "model": None,
        "engine_memory_bytes": int(limit * profile.memory_fraction),
        "free_disk_bytes": shutil.disk_usage(folder).free,
        "profile": {"tuned": profile.tuned, "constants": constants},
        "no_kernels": "there is no GPU, or MLX does not use it" if backend.is_cpu() else None,
        "checks": [],
        "floors": [],
        "ordering": [],
        "answers": None,
        "tuning": None,
        "problems": [],
        "seconds": {},
    }
    return report


def _describe_model(name: str, model: LoadedModel) -> dict[str, Any]:
    """What the engine makes of a model with its default options."""
    config = EngineConfig()
    described: dict[str, Any] = {
        "name": machine.public_name(name),
        "type": model.model_type,
        "dtype": str(model.dtype).removeprefix("mlx.core."),
        "weight_bytes": model.weight_bytes,
        "max_model_len": None,
        "kv_store_tokens": None,
        "problem": None,
    }
    try:
        groups, described["max_model_len"] = size_store(model, config)
        described["kv_store_bytes"] = store_bytes(model, groups, config.block_size)
        described["kv_store_tokens"] = groups[0].num_blocks * config.block_size
    except MetalLiteError as e:  # too little memory
        described["problem"] = one_line(e)
    return described


def _check(use: KernelUse, others: Sequence[KernelUse], full: bool) -> Outcome:
    """The checks of `use` with times, those of others without."""
    timed = checks_for(use)
    rest = [*others, *(full_list() + full_fused_list() if full else ())]
    known = dict.fromkeys(timed)
    more = [c for c in dict.fromkeys(c for u in rest for c in checks_for(u)) if c not in known]
    total = len(timed) + len(more)

    def progress(before: int) -> isolated.Progress:
        return lambda done, _, check: _say(
            f"checking kernels: {before + done + 1} of {total}, {check}"
        )

    results = isolated.run(timed, progress(0), timed=True)
    return [*results, *isolated.run(more, progress(len(timed)), known=results)]


def _check_as_json(result: CheckResult) -> dict[str, Any]:
    check: Check = result.check
    speed = result.speed
    return {
        "kernel": result.kernel,
        "check": str(check),
        "error": result.error if result.failure is None else None,
        "tolerance": result.tolerance,
        "passed": result.passed,
        "failure": result.failure,
        "seconds": speed and speed.seconds,
        "alternative_seconds": speed and speed.alternative,
        "is_slow": bool(speed and speed.is_slow),
    }


def _examine_speed(report: Report, shape: AttentionShape) -> None:
    square = AttentionShape(
        shape.num_heads, shape.num_kv_heads, shape.k_head_dim, shape.k_head_dim, shape.dtype
    )
    with _section(report, "floors", "measuring the memory's speed"):
        found = floors.measure(square, FLOOR_SIZES, lambda what: _say(f"measuring: {what}"))
    report["floors"] = [
        {**asdict(floor), "times_slower": floor.times_slower, "is_slow": floor.is_slow}
        for floor in found
    ]


def _examine_order(report: Report, results: Outcome) -> None:
    """Not if a kernel hangs or ends its process: this graph would, too."""
    if any(result.ended for result in results):
        return
    with _section(report, "ordering", "checking the order of launches"):
        report["ordering"] = [asdict(outcome) for outcome in ordering.stress()]
    report["problems"] += [
        f"order of launches, {o['buffers']}: {o['problem']}"
        for o in report["ordering"]
        if o["problem"]
    ]


def _examine_answers(report: Report, model: LoadedModel) -> None:
    with _section(report, "answers", "comparing answers"):
        try:
            found = generation.compare(model, lambda what: _say(f"comparing: {what}"))
        except MetalLiteError as e:  # too little memory
            report["answers"] = {"model": None, "problem": one_line(e)}
            report["problems"].append(f"answers: {one_line(e)}")
            return
    name = report["model"]["name"] if report["model"] else "demo"
    report["answers"] = {"model": name, "problem": None, **asdict(found), "agrees": found.agrees}
    if not found.agrees:
        count = sum(not d.is_tie for d in found.differences)
        report["problems"].append(
            f"answers: {count} of {found.answers} differ from the reference's by more than rounding"
        )


def _tune(reset: bool) -> Report:
    """Measure and keep the constants of this device, or remove those that were kept."""
    report = _begin()
    report["tuning"] = {"removed": None, "stored": False, "measured": []}
    if reset:
        report["tuning"]["removed"] = tuned.remove()
        return report
    if backend.is_cpu():
        return report
    use = replace(next(iter(COMMON.values())), shapes=(TUNE_SIZES.shape,))
    with _section(report, "checks", "checking the kernels"):
        results = isolated.run(checks_for(use))
        report["checks"] = [_check_as_json(result) for result in results]
    report["problems"] += [str(result) for result in results if not result.passed]
    if report["problems"]:
        return report
    constants = tune_device.constants(TUNE_SIZES)
    names = [constant.name for constant in constants]

    def progress(name: str) -> None:
        _say(f"tuning: {names.index(name) + 1} of {len(names)}, {name}")

    with _section(report, "tuning", "tuning"):
        start = devices.PROFILES[backend.name()]
        found = tuning.tune(constants, start, progress, TUNE_TIMER)
    report["tuning"]["measured"] = [asdict(measured) for measured in found]
    values = {m.name: m.value for m in found if m.failure is None}
    devices.check_constants(values)
    try:
        tuned.store(values)
        report["tuning"]["stored"] = True
    except OSError as e:
        report["problems"].append(f"the constants cannot be kept in {tuned.path()}: {e.strerror}")
    return report


# What tests make smaller.
FLOOR_SIZES, TUNE_SIZES = floors.Sizes(), tune_device.SIZES
TUNE_TIMER: tuning.Timer | None = None


@contextmanager
def _section(report: Report, name: str, title: str) -> Iterator[None]:
    """Notes how many seconds a part takes."""
    _say(title)
    start = time.perf_counter()
    try:
        yield
    finally:
        report["seconds"][name] = round(time.perf_counter() - start, 1)


def _say(what: str) -> None:
    logger.info(f"doctor: {what}", extra={"transient": True})


def _without_names(report: Report, model: str | None) -> Report:
    """The report without the user's folders and the machine's name, which errors may contain."""
    hidden = {str(Path.home()): "~"}
    if model is not None and machine.public_name(model) == "local":
        folder = Path(model).expanduser()
        hidden = {str(folder.resolve()): "MODEL", str(folder): "MODEL", model: "MODEL", **hidden}
    hidden[platform.node()] = "HOST"
    kept = {"machine": report["machine"]}  # a host may be called "Apple"
    return {key: kept.get(key) or _replaced(value, hidden) for key, value in report.items()}


def _replaced(value: Any, hidden: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for text, other in hidden.items():
            if text:
                value = re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", other, value)
        return value
    if isinstance(value, dict):
        return {key: _replaced(item, hidden) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, hidden) for item in value]
    return value
