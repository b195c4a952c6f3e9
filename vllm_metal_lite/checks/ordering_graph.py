"""A graph of launches that write a store or states, and read them alternately.

All keys are zero, so attention gives them equal weight; write n stores the number n as values.  A
launch of a recurrent layer stores n, and returns the number that its state had before.  So the
expected result of every read is known without computing attention or a recurrence.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import RMSNorm, new_ticket
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.latent_attention import decode_tiles, latent_attention
from vllm_metal_lite.kernels.latent_write import NewLatents, latent_write
from vllm_metal_lite.kernels.new_rows import Columns, NewRows, Rope
from vllm_metal_lite.kernels.prefill import plan_tiles, varlen_prefill
from vllm_metal_lite.kernels.recurrence import given
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.kernels.segments import pack_segments
from vllm_metal_lite.kernels.shared_prefix import shared_prefix

WRITES = ("kv_write", "rope_write")
READS = (
    "kv_gather",
    "paged_decode",
    "varlen_prefill",
    "merge_partitions",
    "shared_prefix",
    "fused_decode",
)
LATENTS = "latent_write", "latent_attention"
STATES = ("causal_conv", "gated_delta")  # each writes and reads


# What the fused decode adds to the number, so that one stale slot shows in a mean of 128.
_FAR = 100
_DTYPE = mx.float16
_BLOCK = 16
# Layers with K and V; with latents (their size, and that of rotary keys); with states (channels,
# and the width of a state of the delta rule).
_LAYERS, _LATENT_LAYER, _STATE_LAYER = (0, 0, 1, 1), 2, 3
_LATENT_DIM, _ROPE = 64, 16
_CHANNELS, _WIDTH = 64, 16

# What a read gives, not yet evaluated, and what each row of it must be.
Seen = tuple[mx.array, np.ndarray]


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
    layer: int
    write: int
    values: mx.array
    expected: np.ndarray


class Graph:
    """Launches over the store of three layers and the states of a fourth, and what each slot
    should hold after them.

    The launch of a read may write too: the fused decode does.
    """

    def __init__(self, sizes: GraphSizes) -> None:
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
        latents, rotary_keys = (
            mx.zeros((self.num_slots, 1, n), _DTYPE) for n in (_LATENT_DIM, _ROPE)
        )
        self.stores.append((latents, rotary_keys))
        self.slots = [np.zeros(self.num_slots) for _ in self.stores]
        # Each sequence has a state.
        self.states = {
            "causal_conv": mx.zeros((sizes.sequences, 1, _CHANNELS), _DTYPE),
            "gated_delta": mx.zeros((sizes.sequences, 1, _WIDTH, _WIDTH)),
        }
        self.kept = dict.fromkeys(self.states, 0)
        self.columns = cycle(((0, 1), (1, 0)))  # of states of the delta rule: written, read
        self.ticket = new_ticket()
        mx.eval(self.stores, self.states, self.ticket)
        self.how: dict[str, Any] = {"block_size": _BLOCK, "scale": sizes.head_dim**-0.5}

    def write(self, kernel: str, layer: int, number: int) -> None:
        """Store `number` in all slots (kv_write) or in a half of them (the others)."""
        store, where = self.stores[layer], mx.array(self.order)
        if kernel == "kv_write":
            shape = self.num_slots, self.sizes.num_kv_heads, self.sizes.head_dim
            k, v = mx.zeros(shape, _DTYPE), mx.full(shape, number, _DTYPE)
            self.ticket = kv_write(k, v, where, *store, self.ticket)
            self.slots[layer][:] = number
            return
        half = self.order[number % 2 :: 2]
        where = mx.array(half)
        how: dict[str, Any] = {"keys": store[0], "values": store[1], "ticket": self.ticket}
        how |= {"positions": mx.arange(len(half), dtype=mx.int32), "slot_mapping": mx.array(half)}
        if kernel == "latent_write":
            _, self.ticket = latent_write(self._new_latents(len(half), number), **how)
        else:
            _, self.ticket = rope_write(self._new_rows(len(half), number), **how)
        self.slots[layer][half] = number

    def read(self, kernel: str, layer: int, number: int) -> Read:
        """Launch one read.  number: of the write before it."""
        launch: Callable[[int, int], Seen] = getattr(self, f"_{kernel}")
        values, expected = launch(layer, number)
        return Read(kernel, layer, number, values, expected)

    def _kv_gather(self, layer: int, number: int) -> Seen:
        some = np.roll(self.order, 7 * number)[:64]
        _, values, self.ticket = kv_gather(mx.array(some), *self.stores[layer], self.ticket)
        return values, np.tile(self.slots[layer][some], len(values))

    def _paged_decode(self, layer: int, number: int, splits: int = 1) -> Seen:
        q, plan = self._queries(len(self.tables)), DecodePlan(splits, 4)
        values = self._attend(paged_decode, layer, q, *self._where(), plan=plan)
        return values, self._means(layer, self.tables)

    def _merge_partitions(self, layer: int, number: int) -> Seen:
        return self._paged_decode(layer, number, splits=2)

    def _varlen_prefill(self, layer: int, number: int) -> Seen:
        """The last four tokens of each sequence as a chunk."""
        rows = 4
        ends = np.arange(len(self.tables) + 1, dtype=np.int32) * rows
        num_queries_per_kv = self.sizes.num_heads // self.sizes.num_kv_heads
        tiles = plan_tiles(ends, int(ends[-1]), num_queries_per_kv)
        tables, lens = self._where()
        where = tables, mx.array(ends), lens, mx.array(tiles)
        values = self._attend(varlen_prefill, layer, self._queries(int(ends[-1])), *where)
        sees = [self.sizes.context - rows + 1 + i for i in range(rows)]
        means = [self._means(layer, self.tables, n) for n in sees]
        return values, np.stack(means, axis=1).ravel()

    def _shared_prefix(self, layer: int, number: int) -> Seen:
        """All sequences begin with the first half of one."""
        leader, half = number % len(self.tables), self.tables.shape[1] // 2
        tables = self.tables.copy()
        tables[:, :half] = tables[leader, :half]
        q, (where, lens) = self._queries(len(tables)), self._where(tables)
        lengths = mx.full((len(tables),), half * _BLOCK, mx.int32)
        arrays = q, where, lens, mx.array([leader], mx.int32), lengths
        prefix = shared_prefix(*arrays, *self.stores[layer], self.ticket, splits=2, **self.how)
        self.ticket, plan = prefix.lse, DecodePlan(1, 4)
        values = self._attend(paged_decode, layer, q, where, lens, plan=plan, prefix=prefix)
        return values, self._means(layer, tables)

    def _fused_decode(self, layer: int, number: int) -> Seen:
        """Writes another number to the newest slot of each sequence, and reads."""
        newest, number = self.tables[:, -1] * _BLOCK + _BLOCK - 1, number + _FAR
        self.slots[layer][newest] = number
        rows, plan = self._new_rows(len(self.tables), number), DecodePlan(1, 4)
        values = self._attend(paged_decode, layer, rows, *self._where(), plan=plan)
        return values, self._means(layer, self.tables)

    def _latent_attention(self, layer: int, number: int) -> Seen:
        rows, heads = len(self.tables), self.sizes.num_heads
        tables, lens = self._where()
        cu_seqlens_q, tiles = decode_tiles(rows, heads)
        q, q_pe = (mx.zeros((rows, heads, size), _DTYPE) for size in (_LATENT_DIM, _ROPE))
        where = tables, cu_seqlens_q, lens, tiles
        values = self._attend(latent_attention, layer, q, q_pe, *where)
        return values, self._means(layer, self.tables)

    def _attend(self, kernel: Callable[..., Any], layer: int, *args: Any, **how: Any) -> mx.array:
        """Launch a kernel of attention on a layer's store."""
        values, self.ticket = kernel(*args, *self.stores[layer], self.ticket, **self.how, **how)
        return values

    def _causal_conv(self, layer: int, number: int) -> Seen:
        """A row is the row before it."""
        segments, before = self._segments(), self._replace("causal_conv", number)
        rows = _columns(len(before), _CHANNELS, number)
        weight = mx.repeat(mx.array([[1.0, 0.0]], _DTYPE), _CHANNELS, axis=0)
        where = mx.array(segments), mx.array(plan_conv_tiles(segments))
        states = self.states["causal_conv"]
        y, self.ticket = causal_conv(rows, weight, None, states, *where, self.ticket, silu=False)
        return y, before

    def _gated_delta(self, layer: int, number: int) -> Seen:
        """A state has two columns in use; one is replaced, and the other one is read."""
        segments, before = self._segments(), self._replace("gated_delta", number)
        rows, ones = len(before), mx.ones((len(before), 1))
        k, q = (_one_hot(rows, column) for column in next(self.columns))
        v, gates, states = _columns(rows, _WIDTH, number), given(ones, ones), self.states
        arrays = q, k, v, gates, states["gated_delta"], mx.array(segments), self.ticket
        y, self.ticket = gated_delta(*arrays, num_k_heads=1, max_seqlen=1)
        return y, before

    def _segments(self) -> np.ndarray:
        """A row for each state, from which it starts and which it replaces."""
        slots = np.arange(self.sizes.sequences)
        ends = np.arange(len(slots) + 1)
        return pack_segments(ends, slots, slots, len(slots))

    def _replace(self, kernel: str, number: int) -> np.ndarray:
        """The number that all states of the kernel's layer have, before they get the next."""
        before, self.kept[kernel] = self.kept[kernel], number
        return np.full(self.sizes.sequences, before)

    def _where(self, tables: np.ndarray | None = None) -> tuple[mx.array, mx.array]:
        tables = self.tables if tables is None else tables
        return mx.array(tables), mx.full((len(tables),), self.sizes.context, mx.int32)

    def _means(self, layer: int, tables: np.ndarray, length: int | None = None) -> np.ndarray:
        slots = (tables[:, :, None] * _BLOCK + np.arange(_BLOCK)).reshape(len(tables), -1)
        return self.slots[layer][slots[:, :length]].mean(1)

    def _queries(self, rows: int) -> mx.array:
        return mx.ones((rows, self.sizes.num_heads, self.sizes.head_dim), _DTYPE)

    def _new_rows(self, rows: int, number: int) -> NewRows:
        heads, kv_heads, dim = self.sizes.num_heads, self.sizes.num_kv_heads, self.sizes.head_dim
        q, k = _columns(rows, heads * dim, 1), _columns(rows, kv_heads * dim, 0)
        rope = Rope(dim, False, 10_000.0, 1.0, None)
        return NewRows(q, k, _columns(rows, kv_heads * dim, number), heads, rope, None, None)

    def _new_latents(self, rows: int, number: int) -> NewLatents:
        """Latents of ones; their norm has the weight `number`."""
        heads, norm = self.sizes.num_heads, RMSNorm(mx.full((_LATENT_DIM,), number, _DTYPE), 0.0)
        q, latent = _columns(rows, heads * _ROPE, 1), _columns(rows, _LATENT_DIM, 1)
        k_pe = _columns(rows, _ROPE, 0)
        return NewLatents(q, _ROPE, heads, latent, k_pe, norm, Rope(_ROPE, False, 1e4, 1.0, None))


def _columns(rows: int, width: int, number: int) -> Columns:
    return Columns(mx.full((rows, width), number, _DTYPE), 0)


def _one_hot(rows: int, column: int) -> Columns:
    one_hot = np.eye(_WIDTH, dtype=np.float32)[[column] * rows]
    return Columns(mx.array(one_hot).astype(_DTYPE), 0)


def build(sizes: GraphSizes, reads: Sequence[str] = READS) -> list[Read]:
    """The reads of a graph of writes and reads alternately, not evaluated."""
    graph, found = Graph(sizes), []
    for number, (write, read, layer) in islice(_turns(reads), sizes.launches // 2):
        if write is not None:
            graph.write(write, layer, number)
        found.append(graph.read(read, layer, number))
    return found


def _turns(reads: Sequence[str]) -> Iterator[tuple[int, tuple[str | None, str, int]]]:
    """Numbers from 1; a write, None if the read writes too; the read; the layer."""
    of_kv = zip(cycle(WRITES), cycle(reads), cycle(_LAYERS), strict=False)
    others = cycle(
        [(*LATENTS, _LATENT_LAYER), *((None, kernel, _STATE_LAYER) for kernel in STATES)]
    )
    turns = (turn for kv, other in zip(of_kv, others, strict=False) for turn in (kv, other))
    return enumerate(turns, 1)
