"""Checks that this device runs the writes and reads of a graph in order.

MLX cannot see a write through an input, so a ticket orders the launches (kernels/arguments.py).
Here one graph of many writes and reads is built, and evaluated at once.

All keys are zero, so attention gives them equal weight; write n stores the number n as values.  A
convolution stores n as its state, and returns the number that its state had before.  So each result
is known without computing attention.  A few kernels are enough: all declare the ticket alike, and
tests replay every kernel.

MLX commits launches to the device in command buffers, and orders launches in one buffer by other
means than launches in two.  So the graph runs in processes of their own: with one launch a buffer,
and with all launches in one.  MLX reads the variables for that when it opens the device.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.isolated import environment
from vllm_metal_lite.errors import one_line
from vllm_metal_lite.kernels.arguments import new_ticket
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.new_rows import Columns, NewRows, Rope
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.kernels.segments import pack_segments

# Launches a command buffer, by what the user reads.
BUFFERS = {
    "one launch a command buffer": {"MLX_MAX_OPS_PER_BUFFER": "1"},
    "all launches in one": {"MLX_MAX_OPS_PER_BUFFER": "10000", "MLX_MAX_MB_PER_BUFFER": "10000"},
}
# A process that runs the graph, and the seconds that it may take.
COMMAND, DEADLINE = [sys.executable, "-P", "-m", __spec__.name], 120.0
WRITES = "kv_write", "rope_write"
READS = "kv_gather", "paged_decode"
STATES = "causal_conv"  # writes and reads
# float16 rounds a mean by at most 0.07.  A stale slot is off by 1 or more.
_TOLERANCE = 0.2
_DTYPE = mx.float16
_BLOCK = 16
_CHANNELS = 64  # of the convolution
_ROPE = 10_000.0


@dataclass(frozen=True)
class GraphSizes:
    """launches: their approximate number, half of them reads.  context: tokens of each sequence."""

    launches: int = 300
    sequences: int = 8
    context: int = 128
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 64


@dataclass(frozen=True)
class Read:
    """One read.  write: the number of the write before it.  values: not yet evaluated, with an
    equal number for each of expected (N,), in order."""

    kernel: str
    write: int
    values: mx.array
    expected: np.ndarray


class _Graph:
    """Launches over a store of K and V and the states of a convolution, and the number that each
    slot and each state should hold after them."""

    def __init__(self, sizes: GraphSizes) -> None:
        self._sizes, rng = sizes, np.random.default_rng(0)
        width = sizes.context // _BLOCK
        blocks = rng.permutation(sizes.sequences * width).astype(np.int32)
        self._tables = blocks.reshape(sizes.sequences, width)
        self._order = rng.permutation(blocks.size * _BLOCK).astype(np.int32)
        shape = len(self._order), sizes.num_kv_heads, sizes.head_dim
        self._store = mx.zeros(shape, _DTYPE), mx.zeros(shape, _DTYPE)
        self._slots = np.zeros(len(self._order))
        self._states, self._state = mx.zeros((sizes.sequences, 1, _CHANNELS), _DTYPE), 0
        self._ticket = new_ticket()
        mx.eval(self._store, self._states, self._ticket)

    def write(self, kernel: str, number: int) -> None:
        """Store `number` in all slots (kv_write) or in a half of them (rope_write)."""
        keys, values = self._store
        if kernel == "kv_write":
            k, v, where = mx.zeros_like(keys), mx.full(values.shape, number, _DTYPE), self._order
            self._ticket = kv_write(k, v, mx.array(where), keys, values, self._ticket)
        else:
            where = self._order[number % 2 :: 2]
            positions = mx.arange(len(where), dtype=mx.int32)
            rows = self._new_rows(len(where), number)
            _, self._ticket = rope_write(
                rows,
                positions=positions,
                slot_mapping=mx.array(where),
                keys=keys,
                values=values,
                ticket=self._ticket,
            )
        self._slots[where] = number

    def read(self, kernel: str, number: int) -> Read:
        """Launch one read.  number: that of the write before it."""
        if kernel == "kv_gather":
            some = np.roll(self._order, 7 * number)[:64]
            _, values, self._ticket = kv_gather(mx.array(some), *self._store, self._ticket)
            expected = np.tile(self._slots[some], len(values))
        elif kernel == "paged_decode":
            sizes, plan = self._sizes, DecodePlan(1, 4)
            rows, how = len(self._tables), {"block_size": _BLOCK, "scale": sizes.head_dim**-0.5}
            q = mx.ones((rows, sizes.num_heads, sizes.head_dim), _DTYPE)
            where = mx.array(self._tables), mx.full((rows,), sizes.context, mx.int32)
            values, self._ticket = paged_decode(
                q, *where, *self._store, self._ticket, plan=plan, **how
            )
            slots = self._tables[:, :, None] * _BLOCK + np.arange(_BLOCK)
            expected = self._slots[slots.reshape(rows, -1)].mean(1)
        else:
            values, expected = self._conv(number)
        return Read(kernel, number, values, expected)

    def _conv(self, number: int) -> tuple[mx.array, np.ndarray]:
        """A row is the row before it, and replaces the state."""
        slots = np.arange(len(self._states))
        segments = pack_segments(np.arange(len(slots) + 1), slots, slots, len(slots))
        weight = mx.repeat(mx.array([[1.0, 0.0]], _DTYPE), _CHANNELS, axis=0)
        where = mx.array(segments), mx.array(plan_conv_tiles(segments))
        rows, before = _columns(len(slots), _CHANNELS, number), self._state
        y, self._ticket = causal_conv(
            rows, weight, None, self._states, *where, self._ticket, silu=False
        )
        self._state = number
        return y, np.full(len(slots), before)

    def _new_rows(self, rows: int, number: int) -> NewRows:
        heads, kv_heads = self._sizes.num_heads, self._sizes.num_kv_heads
        dim = self._sizes.head_dim
        q, k = _columns(rows, heads * dim, 1), _columns(rows, kv_heads * dim, 0)
        rope = Rope(dim, False, _ROPE, 1.0, None)
        return NewRows(q, k, _columns(rows, kv_heads * dim, number), heads, rope, None, None)


def _columns(rows: int, width: int, number: int) -> Columns:
    return Columns(mx.full((rows, width), number, _DTYPE), 0)


def build(sizes: GraphSizes) -> list[Read]:
    """The reads of a graph of writes and reads alternately, not evaluated."""
    graph, found = _Graph(sizes), []
    turns = zip(cycle(WRITES), cycle((READS[0], STATES, READS[1])), strict=False)
    for number, (write, read) in enumerate(islice(turns, sizes.launches // 2), 1):
        graph.write(write, number)
        found.append(graph.read(read, number))
    return found


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
                f"read {index + 1} of {len(reads)} ({read.kernel}) follows "
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


def stress() -> Iterator[Outcome]:
    """Run the graph once for each of BUFFERS, in a process of its own."""
    for buffers, variables in BUFFERS.items():
        yield _in_process(buffers, environment() | variables)


def _in_process(buffers: str, variables: Mapping[str, str]) -> Outcome:
    try:
        done = subprocess.run(
            COMMAND, env=variables, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return Outcome(buffers, found["reads"], found["problem"])
    except subprocess.TimeoutExpired:
        return Outcome(buffers, 0, f"no result after {DEADLINE:.0f} s")
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
