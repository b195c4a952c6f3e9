"""How long the checks of a first start take on this machine, and how much of it is compilation.

    METAL_LITE_DEVICE=gpu python -m tools.bench.checks [--timed] [SHAPE ...]

Each check runs twice in this process: the second time nothing is compiled.  --timed: with the
timings beside the next best ways, as at a first start.  SHAPE: a key of USES, by default all.
"""

import argparse
import sys
import time
from collections import defaultdict

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.plan import checks_for
from vllm_metal_lite.checks.run import run
from vllm_metal_lite.specs import AttentionShape, KernelUse, Rotation

_HALVES, _GEMMA = Rotation(128, base=1e6, eps=1e-6), Rotation(256, eps=1e-6)
_WEIGHTS = ((4096, 1024), (1024, 3072))
USES = {
    "qwen3": KernelUse((AttentionShape(16, 8, 128, 128, mx.bfloat16),), 16, (_HALVES,), (1024,)),
    "qwen3-bf16": KernelUse(
        (AttentionShape(16, 8, 128, 128, mx.bfloat16),), 16, (_HALVES,), (1024,), _WEIGHTS
    ),
    "qwen3-kv8": KernelUse(
        (AttentionShape(16, 8, 128, 128, mx.bfloat16, kv_bits=8),), 16, (_HALVES,), (1024,)
    ),
    "gemma3": KernelUse(
        tuple(AttentionShape(8, 4, 256, 256, mx.bfloat16, window=w) for w in (1024, None)), 16,
        (_GEMMA, Rotation(256, base=1e6, eps=1e-6)), (2560,),
    ),
    "float32-256": KernelUse(
        (AttentionShape(4, 4, 256, 256, mx.float32),), 16, (_GEMMA,), (1024,)
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("shapes", nargs="*", choices=[*USES, []], metavar="SHAPE")
    args = parser.parse_args()
    print(backend.describe())
    failed = 0
    for name in args.shapes or USES:
        first: dict[str, float] = defaultdict(float)
        again: dict[str, float] = defaultdict(float)
        for seconds in (first, again):
            for check in checks_for(USES[name]):
                start = time.perf_counter()
                result = run(check, args.timed)
                seconds[check.kernel] += time.perf_counter() - start
                if seconds is first:
                    failed += not result.passed
                    if not result.passed or (result.speed and result.speed.is_slow):
                        print(f"{result}; {result.speed}")
        print(f"\n| {name} | first s | again s |\n| --- | --- | --- |")
        for kernel in first:
            print(f"| {kernel} | {first[kernel]:.2f} | {again[kernel]:.2f} |")
        print(f"| all | {sum(first.values()):.2f} | {sum(again.values()):.2f} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
