"""Checks that this device runs the writes and reads of a graph in order.

MLX cannot see a write through an input, so a ticket orders the launches (kernels/arguments.py).
Here one graph of many writes and reads (ordering_graph.py) is built, and evaluated at once.

MLX commits launches to the device in command buffers, and orders launches in one buffer by other
means than launches in two.  So the graph runs in processes of their own: with one launch a buffer,
and with all launches in one.  MLX reads the variables for that when it opens the device.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.isolated import environment
from vllm_metal_lite.checks.ordering_graph import GraphSizes, Read, build
from vllm_metal_lite.errors import one_line

# Launches a command buffer, by what the user reads.
BUFFERS = {
    "one launch a command buffer": {"MLX_MAX_OPS_PER_BUFFER": "1"},
    "all launches in one": {"MLX_MAX_OPS_PER_BUFFER": "10000", "MLX_MAX_MB_PER_BUFFER": "10000"},
}
# float16 rounds a mean by at most 0.07.  A stale slot is off by 1 or more.
_TOLERANCE = 0.2


def problem(reads: Sequence[Read], results: Mapping[int, mx.array] | None = None) -> str | None:
    """The first read that saw a wrong value, in one line; None: all are right.

    results: id of the array of a read -> the array to look at in its place.
    """
    for index, read in enumerate(reads):
        values = read.values if results is None else results[id(read.values)]
        got = np.array(values.astype(mx.float32))
        got = got.reshape(len(read.expected), -1)
        right = np.abs(got - read.expected[:, None]) <= _TOLERANCE  # NaN is wrong
        if not right.all():
            row, column = np.argwhere(~right)[0]
            return (
                f"read {index + 1} of {len(reads)} ({read.kernel}, layer {read.layer}) follows "
                f"write {read.write} and must see {read.expected[row]:.4g}, "
                f"but saw {got[row, column]:.4g}"
            )
    return None


@dataclass(frozen=True)
class Outcome:
    """buffers: a key of BUFFERS.  reads: how many were compared.  problem: one line, or None."""

    buffers: str
    reads: int
    problem: str | None


def stress(deadline: float = 120.0, command: Sequence[str] = ()) -> Iterator[Outcome]:
    """Run the graph once for each of BUFFERS, in a process of its own.

    deadline: seconds that a process may take.  command: starts such a process, by default this
    module.
    """
    command = command or (sys.executable, "-P", "-m", __spec__.name)
    for buffers, variables in BUFFERS.items():
        yield _in_process(buffers, command, environment() | variables, deadline)


def _in_process(
    buffers: str, command: Sequence[str], variables: Mapping[str, str], deadline: float
) -> Outcome:
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=deadline, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return Outcome(buffers, found["reads"], found["problem"])
    except subprocess.TimeoutExpired:
        return Outcome(buffers, 0, f"no result after {deadline:.0f} s")
    except OSError as e:
        return Outcome(buffers, 0, f"no process can be started: {one_line(e)}")
    except (LookupError, TypeError, ValueError):  # the process ended before its result
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Outcome(buffers, 0, f"the process failed: {last:.200}")


def main() -> None:
    """Run the graph in this process and print its outcome as JSON."""
    reads = build(GraphSizes())
    mx.eval([read.values for read in reads])
    print(json.dumps({"reads": len(reads), "problem": problem(reads)}))


if __name__ == "__main__":
    main()
