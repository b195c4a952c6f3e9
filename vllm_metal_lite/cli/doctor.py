"""`vllm-metal-lite doctor`: describes the machine; checks and times the kernels.

Exit code 0: all is well, or there is no GPU and so nothing to check; 1: a kernel is wrong.
"""

import argparse
import json
import platform
import sys
from importlib.metadata import version
from typing import Any

from tqdm import tqdm

from vllm_metal_lite import __version__, backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.wrap import wrap

_BANDWIDTH_BATCH, _BANDWIDTH_CONTEXT = 16, 4096


def run(args: argparse.Namespace) -> int:
    """Run the command `doctor`."""
    report = examine(args.quick, quiet=args.json)
    text = json.dumps(report, indent=2) if args.json else "\n".join(describe(report))
    print(text if args.json else wrap(text, sys.stdout))
    return 1 if report["attention"]["failed"] else 0


def examine(quick: bool, quiet: bool) -> dict[str, Any]:
    """The whole report, as for JSON.  quick: one shape only, no bandwidth."""
    report: dict[str, Any] = {
        "vllm_metal_lite": __version__,
        "mlx": backend.mlx_version(),
        "mlx_lm": version("mlx-lm"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": backend.describe(),
        "memory_bytes": backend.memory_limit(),
        "checks": [],
        "bandwidth": {},
    }
    failed = []
    if not backend.is_cpu():
        results = _check(quick, quiet)
        failed = [str(r) for r in results if not r.passed]
        report["checks"] = [_as_json(r) for r in results]
        if not quick and not failed:
            report["bandwidth"] = _bandwidth()
    report["attention"] = _path(failed)
    return report


def _check(quick: bool, quiet: bool) -> list:
    from vllm_metal_lite.checks import fusedcheck, isolated, selfcheck
    from vllm_metal_lite.checks.plan import checks_for

    number = 1 if quick else None
    uses = selfcheck.full_list()[:number] + fusedcheck.full_list()[:number]
    checks = list(dict.fromkeys(check for use in uses for check in checks_for(use)))
    with tqdm(total=len(checks), desc="checking kernels", disable=quiet) as bar:
        return isolated.run(checks, lambda done, *_: bar.update(done - bar.n))


def _as_json(result: Any) -> dict[str, Any]:
    return {
        "kernel": result.kernel,
        "shape": str(result.shape),
        "block_size": result.block_size,
        "error": result.error if result.failure is None else None,
        "tolerance": result.tolerance,
        "passed": result.passed,
        "failure": result.failure,
    }


def _bandwidth() -> dict[str, float]:
    """Bytes per second: a copy, decoding from the store, and MLX's SDPA."""
    from vllm_metal_lite.checks import measure
    from vllm_metal_lite.specs import AttentionShape

    load = measure.Workload(
        AttentionShape(16, 8, 128, 128, mx.float16), _BANDWIDTH_BATCH, _BANDWIDTH_CONTEXT
    )
    return {
        "copy": measure.copy_bandwidth(256 << 20),
        "paged_decode": load.decode().bandwidth,
        "mlx_sdpa_contiguous": max(load.sdpa(compiled=c).bandwidth for c in (True, False)),
    }


def _path(failed: list[str]) -> dict[str, Any]:
    if backend.is_cpu():
        path, reason = "reference", "kernels need a GPU, and MLX computes on the CPU here"
    elif failed:
        path, reason = "reference", f"{len(failed)} kernel checks failed"
    else:
        path, reason = "kernels", "every kernel agrees with the reference on this device"
    return {"path": path, "reason": reason, "failed": failed}


def describe(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    lines = [
        f"vllm-metal-lite {report['vllm_metal_lite']}, mlx {report['mlx']}, "
        f"mlx-lm {report['mlx_lm']}, Python {report['python']}, {report['system']}",
        f"Device:    {report['device']}",
        f"Memory:    {report['memory_bytes'] / 2**30:.1f} GiB may be used",
    ]
    for kernel in dict.fromkeys(c["kernel"] for c in report["checks"]):
        lines.append(f"{kernel + ':':18}" + _verdict(report["checks"], kernel))
    if report["bandwidth"]:
        speeds = {name: f"{value / 1e9:,.0f} GB/s" for name, value in report["bandwidth"].items()}
        lines.append(
            f"Bandwidth: copy {speeds['copy']}; {_BANDWIDTH_BATCH} decodes at a context of "
            f"{_BANDWIDTH_CONTEXT:,}: {speeds['paged_decode']} from the paged store, MLX's own "
            f"attention {speeds['mlx_sdpa_contiguous']} from contiguous memory"
        )
    attention = report["attention"]
    lines += [f"  {failure}" for failure in attention["failed"]]
    lines.append(f"Attention: {attention['path']} ({attention['reason']})")
    return lines


def _verdict(checks: list[dict[str, Any]], kernel: str) -> str:
    own = [c for c in checks if c["kernel"] == kernel]
    right = sum(c["passed"] for c in own)
    if right < len(own):
        return f"WRONG in {len(own) - right} of {len(own)} checks"
    worst = max((c["error"] / c["tolerance"] for c in own if c["tolerance"]), default=0.0)
    return f"right in {right} checks, worst error {100 * worst:.0f} % of what is allowed"
