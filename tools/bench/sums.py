"""The time of a sum over ranks (mx.distributed.all_sum), as a step of a sharded model makes them.

    python -m tools.bench.sums [--ranks 2]

The ranks are processes of this host: over NCCL with a GPU each, or over MLX's ring on a CPU.
Each sum waits for the one before, in one evaluation.  Prints Markdown; the least of the rounds.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from tools.dev.run_main import run_main
from vllm_metal_lite import distributed
from vllm_metal_lite.backend import mx

# Values of 16 bits: 1, 8 and 64 rows of a model that is 4,096 wide; the last shows the bandwidth.
SIZES = 4096, 8 * 4096, 64 * 4096, 4 << 20
ROUNDS = 7


def measure(rank: int, addresses: Sequence[str], sizes: Sequence[int]) -> None:
    how = distributed.links(len(addresses), None)
    ranks = distributed.join(rank, [[address] for address in addresses], how)
    if rank == 0:
        print(f"{how.backend}\n\n| bytes | microseconds |\n| --- | --- |")
    for size in sizes:
        sums = min(max(8, (1 << 21) // size), 256)
        x, times = mx.zeros((size,), mx.bfloat16), []
        mx.eval(x)
        for _ in range(ROUNDS):
            start, y = time.perf_counter(), x
            for _ in range(sums):
                y = mx.distributed.all_sum(y + 1, group=ranks.group)
            mx.eval(y)
            times.append((time.perf_counter() - start) / sums)
        if rank == 0:
            print(f"| {2 * size:,} | {1e6 * min(times):,.0f} |", flush=True)


def start(size: int, values: Sequence[int]) -> int:
    """Run `measure` in so many processes of this host; the first exit code that is not 0."""
    sockets = [distributed.reserve("127.0.0.1") for _ in range(size)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    command = [
        sys.executable, "-m", "tools.bench.sums", "--addresses", *addresses,
        "--values", *map(str, values),
    ]  # fmt: skip
    processes = []
    for rank in range(size):
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)}
        processes.append(subprocess.Popen([*command, "--rank", str(rank)], env=env))
    try:
        return next((code for p in processes if (code := p.wait())), 0)
    finally:
        for p in processes:
            p.kill()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--values", nargs="+", type=int, default=SIZES, help="of 16 bits, in a sum")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.ranks < 2:
        parser.error(f"--ranks must be at least 2, got {args.ranks}")
    if args.rank is None:
        return start(args.ranks, args.values)
    measure(args.rank, args.addresses, args.values)
    return 0


if __name__ == "__main__":
    run_main(main)
