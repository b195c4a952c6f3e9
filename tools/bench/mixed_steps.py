"""Times steps with prompts: this checkout, another one, and one without rows as decodes.

    python -m tools.bench.mixed_steps                    this checkout; a GPU
    git archive main | tar -x -C DIR; python -m tools.bench.mixed_steps --before DIR
    python -m tools.bench.mixed_steps --tiny             a CPU, a tiny model; its times mean nothing

Large prompts use MLX's SDPA, as on CUDA.  K and V are zeros, weights random.  Steps are launched
one ahead, as in serving.  Each column has its own process.  Prints Markdown: milliseconds a step,
and how its prompts attend.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_ROOT = Path(__file__).parents[2]
_MODEL, _TINY = "qwen3-0.6b", "128x2"
_WARM_UP, _STEPS, _BLOCK, _DECODE = 4, 12, 16, 1000


class Load(NamedTuple):
    """decodes: each behind _DECODE tokens.  rows: of each prompt.  behind: tokens before these
    rows, which all prompts share."""

    decodes: int
    rows: tuple[int, ...]
    behind: int

    def __str__(self) -> str:
        counts = f"{len(self.rows)} x " if len(self.rows) > 1 else ""
        rows = self.rows[0] if len(set(self.rows)) == 1 else "/".join(map(str, self.rows))
        return f"{self.decodes} decodes, {counts}{rows} rows behind {self.behind:,}"

    def tiny(self) -> "Load":
        return Load(min(self.decodes, 2), tuple(-(-n // 16) for n in self.rows), self.behind // 64)


LOADS = (
    Load(4, (128,), 2048),
    Load(4, (256,), 2048),
    Load(4, (512,), 0),
    Load(4, (512,), 2048),
    Load(4, (512,), 7168),
    Load(4, (256,), 16_000),
    Load(16, (40,) * 8, 1024),
    Load(16, (37, 90, 140, 200), 0),
    Load(4, (12,), 2048),
    Load(4, (60,), 2048),
    Load(4, (60,), 16_384),
    Load(0, (32,), 4096),
    Load(0, (8,) * 8, 4608),
)


def measure(tiny: bool, deadline: float, **device: Any) -> Iterator[tuple[float, str]]:
    """Milliseconds and the way of each load, until the time is over."""
    from metal.host import installed
    from tools.bench.lib.models import get_model
    from tools.bench.lib.trust import trusted
    from vllm_metal_lite import EngineConfig, LLMEngine, backend, devices
    from vllm_metal_lite.batch.input_batch import InputBatch
    from vllm_metal_lite.runner.runner import bucket

    loads = [load.tiny() for load in LOADS] if tiny else LOADS
    warm_up, steps = (1, 2) if tiny else (_WARM_UP, _STEPS)
    longest = max(max(load.rows) + load.behind for load in loads) + _DECODE
    seats = max(load.decodes + len(load.rows) for load in loads)
    blocks = 2 * longest // _BLOCK + seats * (_DECODE // _BLOCK + 40)
    with ExitStack() as stack:
        stack.enter_context(devices.using(replace(devices.profile(), **device)))
        stack.enter_context(trusted("gather"))
        if backend.is_cpu():
            stack.enter_context(installed())
        sizes = {"num_blocks": blocks, "block_size": _BLOCK, "max_num_seqs": seats}
        how = {"attention": "kernels", "max_model_len": longest, "enable_prefix_caching": False}
        model = get_model(_TINY if tiny else _MODEL, bits=None)
        engine = LLMEngine(model, EngineConfig(**how, **sizes))
        runner = engine.runner
        for load in loads:
            if time.monotonic() > deadline:
                return
            inputs, free = InputBatch(seats, longest, _BLOCK), iter(range(blocks))
            shared = [next(free) for _ in range(load.behind // _BLOCK)]
            spans = [(_DECODE, 1)] * load.decodes + [(load.behind, rows) for rows in load.rows]
            seats_of = []
            for n, (computed, rows) in enumerate(spans):
                own = shared if n >= load.decodes else []
                seat = inputs.add([1] * (computed + rows), computed + rows)
                count = -(-(computed + rows) // _BLOCK) - len(own)
                inputs.append_blocks(seat, [*own, *(next(free) for _ in range(count))])
                seats_of.append(seat)
            batch = inputs.pack(np.array(seats_of), *np.array(spans).T)
            prompts = runner.attention.prepare(batch, bucket(batch.num_tokens)).plan.prompts
            way = "as decodes" if prompts is None else type(prompts).__name__
            way += ", compiled" if prompts is None or prompts.repeats else ""
            times = []
            before = runner.execute(batch)
            for _ in range(warm_up + steps):
                start = time.perf_counter()
                result = runner.execute(batch)
                before.wait()
                before = result
                times.append(time.perf_counter() - start)
            before.wait()
            yield 1e3 * statistics.median(times[warm_up:]), way


def child(args: argparse.Namespace) -> None:
    import vllm_metal_lite

    print(f"{args.child}: {vllm_metal_lite.__file__}", file=sys.stderr)
    device = {"rows_as_decodes": 0} if args.child == "no rows as decodes" else {}
    for found in measure(args.tiny, time.monotonic() + args.seconds, **device):
        print(json.dumps(found), flush=True)


def column(name: str, root: Path, args: argparse.Namespace) -> list[str]:
    """The cells of one column, measured with the packages of `root`."""
    words = [sys.executable, "-P", __file__, "--child", name, "--seconds", str(args.seconds)]
    path = f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    words, env = words + ["--tiny"] * args.tiny, os.environ | {"PYTHONPATH": path}
    run = subprocess.run(words, cwd=root, stdout=subprocess.PIPE, text=True, check=False, env=env)
    if run.returncode:
        print(f"{name} ended with {run.returncode}", file=sys.stderr)
    cells = [f"{ms:.2f} ({way})" for ms, way in map(json.loads, run.stdout.splitlines())]
    return cells + ["-"] * (len(LOADS) - len(cells))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout")
    parser.add_argument("--seconds", type=float, default=90, help="of a column (default 90)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return 0
    columns = {"this": _ROOT, "no rows as decodes": _ROOT}
    if args.before:
        columns = {"before": args.before.resolve()} | columns
    cells = [column(name, root, args) for name, root in columns.items()]
    print("| step | " + " | ".join(f"{name}, ms" for name in columns) + " |")
    print("| --- " * (len(columns) + 1) + "|")
    for load, *row in zip(LOADS, *cells, strict=True):
        print(f"| {load.tiny() if args.tiny else load} | " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
