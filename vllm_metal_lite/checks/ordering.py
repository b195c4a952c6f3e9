"""Checks that this device runs the writes and reads of a graph in order.

MLX cannot see a write through an input, so a token orders the launches (kernels/common.py).  Here
one graph of many writes and reads of two layers is built, and evaluated at once.  All keys are
zero, so attention weighs them alike; write n stores the number n as values.  Every read therefore
has an answer that is known without computing attention.

MLX commits launches to the device in command buffers, and orders launches in one buffer by other
means than launches in two.  So the graph runs in processes of their own: with one launch a buffer,
and with all launches in one.  MLX reads the variables for that when it opens the device.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from typing import Any

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import one_line
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.new_rows import Columns, NewRows, Rope
from vllm_metal_lite.kernels.prefill import plan_tiles, varlen_prefill
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.kernels.shared_prefix import shared_prefix

WRITES = ("kv_write", "rope_write")
READS = ("kv_gather", "paged_decode", "varlen_prefill", "merge_partitions", "shared_prefix",
         "fused_decode")  # fmt: skip

# Launches a command buffer, by what the user reads.
BUFFERS = {
    "one launch a command buffer": {"MLX_MAX_OPS_PER_BUFFER": "1"},
    "all launches in one": {"MLX_MAX_OPS_PER_BUFFER": "10000", "MLX_MAX_MB_PER_BUFFER": "10000"},
}
# float16 rounds a mean by at most 0.07.  A stale slot is off by 1 or more.
_TOLERANCE = 0.2
# What the fused decode adds to the number, so that one stale slot shows in a mean of 128.
_FAR = 100
_DTYPE = mx.float16
_BLOCK = 16


@dataclass(frozen=True)
class Sizes:
    """launches: writes and reads, in turns.  context: tokens of each sequence."""

    launches: int = 200
    sequences: int = 8
    context: int = 128
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 64


@dataclass(frozen=True)
class Read:
    """One read.  write: the number of the write before it.  values: (rows, heads, dim), not yet
    evaluated.  expected: (rows,)."""

    kernel: str
    layer: int
    write: int
    values: mx.array
    expected: np.ndarray


class Graph:
    """Launches over a store of two layers, and what each slot should hold after them.

    The launch of a read may write too: the fused decode does.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        rng = np.random.default_rng(0)
        width = sizes.context // _BLOCK
        blocks = rng.permutation(sizes.sequences * width).astype(np.int32)
        self.tables = blocks.reshape(sizes.sequences, width)
        self.num_slots = blocks.size * _BLOCK
        self.order = rng.permutation(self.num_slots).astype(np.int32)
        shape = self.num_slots, sizes.num_kv_heads, sizes.head_dim
        # (keys, values) of each layer.
        self.stores = [(mx.zeros(shape, _DTYPE), mx.zeros(shape, _DTYPE)) for _ in range(2)]
        self.slots = [np.zeros(self.num_slots) for _ in range(2)]
        self.token = new_token()
        mx.eval(self.stores, self.token)
        self.how: dict[str, Any] = {"block_size": _BLOCK, "scale": sizes.head_dim**-0.5}

    def write(self, kernel: str, layer: int, number: int) -> None:
        """Store `number` in all slots (kv_write) or in a half of them (rope_write)."""
        store, where = self.stores[layer], mx.array(self.order)
        if kernel == "kv_write":
            k, v = self._new(self.num_slots, number)
            self.token = kv_write(k, v, where, *store, self.token)
            self.slots[layer][:] = number
            return
        half = self.order[number % 2 :: 2]
        _, self.token = rope_write(
            self._new_rows(len(half), number), positions=mx.arange(len(half), dtype=mx.int32),
            slot_mapping=mx.array(half), keys=store[0], values=store[1], token=self.token,
        )  # fmt: skip
        self.slots[layer][half] = number

    def read(self, kernel: str, layer: int, number: int) -> Read:
        """Launch one read.  number: of the write before it."""
        launch: Callable[[int, int], tuple[mx.array, np.ndarray]] = getattr(self, f"_{kernel}")
        values, expected = launch(layer, number)
        return Read(kernel, layer, number, values, expected)

    def _kv_gather(self, layer: int, number: int) -> tuple[mx.array, np.ndarray]:
        some = np.roll(self.order, 7 * number)[:64]
        _, values, self.token = kv_gather(mx.array(some), *self.stores[layer], self.token)
        return values, self.slots[layer][some]

    def _paged_decode(
        self, layer: int, number: int, splits: int = 1
    ) -> tuple[mx.array, np.ndarray]:
        values, self.token = paged_decode(
            self._queries(len(self.tables)), *self._where(), *self.stores[layer], self.token,
            plan=DecodePlan(splits, 4), **self.how,
        )  # fmt: skip
        return values, self._means(layer, self.tables)

    def _merge_partitions(self, layer: int, number: int) -> tuple[mx.array, np.ndarray]:
        return self._paged_decode(layer, number, splits=2)

    def _varlen_prefill(self, layer: int, number: int) -> tuple[mx.array, np.ndarray]:
        """The last four tokens of each sequence as a chunk."""
        rows = 4
        ends = np.arange(len(self.tables) + 1, dtype=np.int32) * rows
        group = self.sizes.num_heads // self.sizes.num_kv_heads
        tiles = plan_tiles(ends, int(ends[-1]), group)
        tables, lens = self._where()
        values, self.token = varlen_prefill(
            self._queries(int(ends[-1])), tables, mx.array(ends), lens, mx.array(tiles),
            *self.stores[layer], self.token, **self.how,
        )  # fmt: skip
        sees = [self.sizes.context - rows + 1 + i for i in range(rows)]
        means = [self._means(layer, self.tables, n) for n in sees]
        return values, np.stack(means, axis=1).ravel()

    def _shared_prefix(self, layer: int, number: int) -> tuple[mx.array, np.ndarray]:
        """All sequences begin with the first half of one."""
        leader, half = number % len(self.tables), self.tables.shape[1] // 2
        tables = self.tables.copy()
        tables[:, :half] = tables[leader, :half]
        q, (where, lens) = self._queries(len(tables)), self._where(tables)
        prefix = shared_prefix(
            q, where, lens, mx.array([leader], mx.int32),
            mx.full((len(tables),), half * _BLOCK, mx.int32), *self.stores[layer], self.token,
            splits=2, **self.how,
        )  # fmt: skip
        values, self.token = paged_decode(
            q, where, lens, *self.stores[layer], prefix.lse, plan=DecodePlan(1, 4), prefix=prefix,
            **self.how,
        )  # fmt: skip
        return values, self._means(layer, tables)

    def _fused_decode(self, layer: int, number: int) -> tuple[mx.array, np.ndarray]:
        """Writes another number to the newest slot of each sequence, and reads."""
        newest, number = self.tables[:, -1] * _BLOCK + _BLOCK - 1, number + _FAR
        self.slots[layer][newest] = number
        values, self.token = paged_decode(
            self._new_rows(len(self.tables), number), *self._where(), *self.stores[layer],
            self.token, plan=DecodePlan(1, 4), **self.how,
        )  # fmt: skip
        return values, self._means(layer, self.tables)

    def _where(self, tables: np.ndarray | None = None) -> tuple[mx.array, mx.array]:
        tables = self.tables if tables is None else tables
        return mx.array(tables), mx.full((len(tables),), self.sizes.context, mx.int32)

    def _means(self, layer: int, tables: np.ndarray, length: int | None = None) -> np.ndarray:
        slots = (tables[:, :, None] * _BLOCK + np.arange(_BLOCK)).reshape(len(tables), -1)
        return self.slots[layer][slots[:, :length]].mean(1)

    def _queries(self, rows: int) -> mx.array:
        return mx.ones((rows, self.sizes.num_heads, self.sizes.head_dim), _DTYPE)

    def _new(self, rows: int, number: int) -> tuple[mx.array, mx.array]:
        shape = rows, self.sizes.num_kv_heads, self.sizes.head_dim
        return mx.zeros(shape, _DTYPE), mx.full(shape, number, _DTYPE)

    def _new_rows(self, rows: int, number: int) -> NewRows:
        k, v = (Columns(a.reshape(rows, -1), 0) for a in self._new(rows, number))
        q = Columns(self._queries(rows).reshape(rows, -1), 0)
        rope = Rope(self.sizes.head_dim, False, 10_000.0, 1.0, None)
        return NewRows(q, k, v, self.sizes.num_heads, rope, None, None)


def build(sizes: Sizes, reads: Sequence[str] = READS) -> list[Read]:
    """The reads of a graph of writes and reads in turns, not evaluated."""
    graph = Graph(sizes)
    layers = cycle((0, 0, 1, 1))
    steps = zip(count(1), cycle(WRITES), cycle(reads), layers, strict=False)
    found = []
    for number, write, read, layer in islice(steps, sizes.launches // 2):
        graph.write(write, layer, number)
        found.append(graph.read(read, layer, number))
    return found


def problem(reads: Sequence[Read], results: Mapping[int, mx.array] | None = None) -> str | None:
    """The first read that saw a wrong value, in one line; None: all are right.

    results: id of the array of a read -> the array to look at in its place.
    """
    for index, read in enumerate(reads):
        values = read.values if results is None else results[id(read.values)]
        got = np.array(values.astype(mx.float32))
        right = np.abs(got - read.expected[:, None, None]) <= _TOLERANCE  # NaN is wrong
        if not right.all():
            row, head, dim = np.argwhere(~right)[0]
            return (
                f"read {index + 1} of {len(reads)} ({read.kernel}, layer {read.layer}) follows "
                f"write {read.write} and must see {read.expected[row]:.4g}, "
                f"but saw {got[row, head, dim]:.4g}"
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
    # The packages that this process uses, wherever it found them.
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    for buffers, variables in BUFFERS.items():
        environment = {**os.environ, "PYTHONPATH": path, **variables}
        yield _in_process(buffers, command, environment, deadline)


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
    reads = build(Sizes())
    mx.eval([read.values for read in reads])
    print(json.dumps({"reads": len(reads), "problem": problem(reads)}))


if __name__ == "__main__":
    main()
