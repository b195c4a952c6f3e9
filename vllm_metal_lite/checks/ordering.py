"""Checks that this device runs the writes and reads of a graph in order.

MLX cannot see a write through an input, so a ticket orders the launches (kernels/store.py).
Here one graph of many writes and reads is built, and evaluated at once.

All keys are zero, so attention gives them equal weight; write n stores the number n as all values,
and each read behind it must see n.  A few kernels are enough: all declare the ticket alike, and
tests replay every kernel.

MLX commits launches to the device in command buffers, and orders launches in one buffer by other
means than launches in two.  So the graph runs in processes of their own: with one launch a buffer,
and with all launches in one.  MLX reads the variables for that when it opens the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import isolated
from vllm_metal_lite.errors import one_line
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.kv.store import LayerSpec

# MLX's settings for each way to divide launches among command buffers, by its description.
BUFFERS = {
    "one launch a command buffer": {"MLX_MAX_OPS_PER_BUFFER": "1"},
    "all launches in one": {"MLX_MAX_OPS_PER_BUFFER": "10000", "MLX_MAX_MB_PER_BUFFER": "10000"},
}
# Seconds for the graph.
DEADLINE = 120.0
# float16 rounds a mean by at most 0.07.  A stale slot is off by 1 or more.
_TOLERANCE = 0.2
_DTYPE = mx.float16
_BLOCK = 16


# The kernel of a read; the number of the last write before it, which all values must be; and the
# values, which are not yet evaluated.
Read = tuple[str, int, mx.array]


def build(
    launches: int = 300,
    sequences: int = 8,
    context: int = 128,
    num_heads: int = 16,
    num_kv_heads: int = 8,
    head_dim: int = 64,
) -> list[Read]:
    """The reads of a graph of writes and reads alternately, not evaluated.

    launches: their approximate number, half of them reads.  context: tokens of each sequence.
    """
    rng = np.random.default_rng(0)
    blocks = rng.permutation(sequences * context // _BLOCK).astype(np.int32)
    order = rng.permutation(len(blocks) * _BLOCK).astype(np.int32)
    tables, slots = mx.array(blocks.reshape(sequences, -1)), mx.array(order)
    spec = LayerSpec(num_kv_heads, head_dim, head_dim, _DTYPE)
    shape = len(order), num_kv_heads, head_dim
    arrays = mx.zeros(shape, _DTYPE), mx.zeros(shape, _DTYPE), new_ticket()
    store, plan = LayerStore(*arrays, spec, _BLOCK), DecodePlan(1, 4)
    q = mx.ones((sequences, num_heads, head_dim), _DTYPE)
    lens = mx.full((sequences,), context, mx.int32)
    mx.eval(store.arrays)
    reads: list[Read] = []
    for number in range(1, launches // 2 + 1):
        new = mx.zeros(shape, _DTYPE), mx.full(shape, number, _DTYPE)
        store = store._replace(ticket=kv_write(*new, slots, store))
        if number % 2:
            some = mx.array(np.roll(order, 7 * number)[:64])
            _, found, ticket = kv_gather(some, store)
            reads.append(("kv_gather", number, found))
        else:
            found, ticket = paged_decode(q, tables, lens, store, Scores(1.0), plan=plan)
            reads.append(("paged_decode", number, found))
        store = store._replace(ticket=ticket)
    return reads


def problem(reads: Sequence[Read]) -> str | None:
    """The first read that saw a wrong value, in one line; None: all values are correct."""
    for index, (kernel, write, values) in enumerate(reads):
        got = np.array(values.astype(mx.float32))
        wrong = got[~(np.abs(got - write) <= _TOLERANCE)]  # NaN is wrong
        if wrong.size:
            return (
                f"read {index + 1} of {len(reads)} ({kernel}) must see {write}, "
                f"but saw {wrong[0]:.4g}"
            )
    return None


@dataclass(frozen=True)
class Outcome:
    """buffers: a key of BUFFERS.  reads: how many it compared.  problem: one line, or None."""

    buffers: str
    reads: int
    problem: str | None


def stress() -> Iterator[Outcome]:
    """Run the graph once for each of BUFFERS, in a process of its own."""
    for buffers, variables in BUFFERS.items():
        try:
            with closing(isolated.Child(variables)) as child:
                yield Outcome(buffers, *child.call(DEADLINE, run))
        except OSError as e:
            yield Outcome(buffers, 0, one_line(e))


def run() -> tuple[int, str | None]:
    """The number of reads of the graph, and their problem."""
    reads = build()
    mx.eval([values for *_, values in reads])
    return len(reads), problem(reads)
