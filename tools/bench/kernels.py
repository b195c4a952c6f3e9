"""Check every kernel on this device at the shapes of models, and time each beside its fallback.

    python -m tools.bench.kernels                         a GPU; some minutes
    python -m tools.bench.kernels --only paged_decode     one kernel
    python -m tools.bench.kernels --full                  many more shapes, not timed

Prints Markdown: microseconds of a call by the kernel and by its replacement, timed alternately.
Exit code 1 if a kernel is wrong.
"""

import argparse

from tools.dev.run_main import run_main
from vllm_metal_lite import MetalLiteError, backend
from vllm_metal_lite.checks.for_model import checks_for
from vllm_metal_lite.checks.popular_shapes import COMMON, full_list
from vllm_metal_lite.checks.run_check import run
from vllm_metal_lite.checks.speed import copy_bandwidth
from vllm_metal_lite.kernels.registry import REGISTRY


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="KERNEL", choices=REGISTRY)
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    if backend.is_cpu():
        raise MetalLiteError("kernels need a GPU, and MLX sees none")
    timed = {check: None for use in COMMON.values() for check in checks_for(use)}
    more = {check: None for use in full_list() for check in checks_for(use) if args.full}
    wrong = 0
    print(f"{backend.describe()}\n")
    print("| check | error of what is allowed | us | fallback, us | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for check in [*timed, *(check for check in more if check not in timed)]:
        if args.only and check.kernel not in args.only:
            continue
        result = run(check, timed=check in timed)
        wrong += not result.passed
        error = "equal" if result.passed else str(result)
        if result.passed and result.tolerance:
            error = f"{100 * result.error / result.tolerance:.0f} %"
        speed = result.speed
        times = ["-"] * 3
        if speed is not None:
            times = [f"{1e6 * seconds:,.0f}" for seconds in (speed.seconds, speed.fallback_seconds)]
            times.append(f"{1 / speed.ratio:.2f}")
        print(f"| {check} | {error} | {' | '.join(times)} |", flush=True)
    if not args.only:
        print(f"\nA copy moves {copy_bandwidth() / 1e9:,.0f} GB/s.")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
