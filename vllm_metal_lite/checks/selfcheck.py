"""Checks each kernel on this device against the reference.

Runs before the first use of the kernels, for exactly the shapes of a model.  `vllm-metal-lite
doctor` checks many more shapes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.checks.result import TOLERANCE, CheckResult, largest_error, run_checks
from vllm_metal_lite.config import BLOCK_SIZES
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.common import new_token, unsupported
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.prefill import plan_tiles, varlen_prefill
from vllm_metal_lite.kernels.shared_prefix import shared_prefix
from vllm_metal_lite.kv.row_format import RowFormat
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.specs import AttentionShape

# Contexts of the sequences: one key, within a block, over many blocks, more than one split.
_CONTEXTS = np.array((1, 7, 33, 300, 700))
# Rows of each sequence in the prompt check: whole prompts, and chunks after a context.
_PROMPT_ROWS = np.array((1, 7, 9, 40, 70))


def check(shape: AttentionShape, block_size: int) -> list[CheckResult]:
    """Run every kernel at one shape against the reference."""
    case = _Case(shape, block_size)
    form = "" if shape.kv_bits is None else "_quantised"
    checks: dict[str, Callable[[], tuple[float, float]]] = {
        "kv_write" + form: case.write,
        "kv_gather" + form: case.gather,
        "paged_decode": lambda: case.decode(DecodePlan(1, 8)),
        "merge_partitions": lambda: case.decode(DecodePlan(4, 4)),
    }
    if unsupported(shape, prefill=True) is None:
        checks["varlen_prefill"] = case.prefill
        if shape.window is None:
            checks["shared_prefix"] = case.shared
    return run_checks(checks, shape, block_size)


def full_list() -> list[tuple[AttentionShape, int]]:
    """The shapes and block sizes that `doctor` checks: each dimension varied in turn."""
    heads = ((4, 4), (8, 2), (5, 1), (16, 8), (24, 2), (71, 1))
    dims = ((32, 32), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128),
            (192, 192), (256, 256))  # fmt: skip
    extras = ({"window": 20}, {"softcap": 5.0}, {"sinks": True},
              {"window": 70, "softcap": 20.0, "sinks": True})  # fmt: skip
    cases = []
    for dtype in TOLERANCE:
        cases += [(AttentionShape(*h, 64, 64, dtype), 16) for h in heads]
        cases += [(AttentionShape(4, 2, *d, dtype), 16) for d in dims]
        cases += [(AttentionShape(8, 2, 128, 128, dtype, **e), 16) for e in extras]
        cases += [(AttentionShape(4, 2, 128, 128, dtype), bs) for bs in BLOCK_SIZES]
        cases += [
            (AttentionShape(8, 2, *d, dtype, kv_bits=bits), 16)
            for bits in (8, 4)
            for d in ((64, 64), (80, 80), (128, 128), (192, 128))
        ]
    return cases


class _Case:
    """A store with random values and blocks in random order; free slots are NaN."""

    def __init__(self, shape: AttentionShape, block_size: int) -> None:
        self.shape, self.block_size = shape, block_size
        rng = np.random.default_rng(0)
        inputs = InputBatch(len(_CONTEXTS), _CONTEXTS.max(), block_size)
        rows = np.array([inputs.add([0] * n, n) for n in _CONTEXTS])
        counts = -(-_CONTEXTS // block_size)
        num_blocks = int(counts.sum()) + 4
        free = rng.permutation(num_blocks).tolist()
        for row, count in zip(rows, counts, strict=True):
            inputs.append_blocks(row, [free.pop() for _ in range(count)])
        self.decodes, self.prompts = (
            inputs.pack(rows, _CONTEXTS - lengths, lengths)
            for lengths in (np.ones_like(_CONTEXTS), _PROMPT_ROWS)
        )

        slots = (num_blocks + 1) * block_size
        owned = np.zeros(slots, bool)
        for table, n in zip(self.decodes.block_tables, _CONTEXTS, strict=True):
            at = np.arange(n)
            owned[table[at // block_size] * block_size + at % block_size] = True
        self.owned = np.flatnonzero(owned)

        def draw(*dims: int) -> np.ndarray:
            drawn = mx.array(rng.standard_normal(dims).astype(np.float32)).astype(shape.dtype)
            return np.array(drawn.astype(mx.float32))

        self.spec = LayerSpec(
            shape.num_kv_heads, shape.k_head_dim, shape.v_head_dim, shape.dtype, bits=shape.kv_bits
        )
        self.formats = self.spec.k_row, self.spec.v_row
        self.drawn = [draw(slots, shape.num_kv_heads, row.dim) for row in self.formats]
        self.kept, (self.keys, self.values) = self._fill(owned)
        self.q = draw(self.prompts.num_tokens, shape.num_heads, shape.k_head_dim)
        self.sinks = 2 * draw(shape.num_heads) if shape.sinks else None
        self.num_blocks = num_blocks

    def _fill(self, owned: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The store's K and V, made on this machine's CPU, and their float32 values.

        Free slots are NaN.  In a quantised store all their bits are ones, so the scales are NaN.
        """
        kept, values = [], []
        for row, drawn in zip(self.formats, self.drawn, strict=True):
            with mx.stream(mx.cpu):
                packed = row.pack(mx.array(drawn))
                values.append(np.array(row.unpack(packed).astype(mx.float32)))
                kept.append(np.array(packed if row.bits else packed.astype(mx.float32)))
            values[-1][~owned] = np.nan
            kept[-1][~owned] = 0xFFFFFFFF if row.bits else np.nan
        return kept, values

    def _array(self, values: np.ndarray) -> mx.array:
        return mx.array(values).astype(self.shape.dtype)

    def write(self) -> tuple[float, float]:
        """Rows written to an empty store; every third row has a negative slot."""
        keys, values = map(mx.zeros_like, self._store())
        slots = self.owned.astype(np.int32)
        skipped = slots[::3]
        target = np.where(np.isin(slots, skipped), -1, slots).astype(np.int32)
        k, v = (self._array(a[self.owned]) for a in self.drawn)
        mx.eval(keys, values, k, v)
        token = kv_write(k, v, mx.array(target), keys, values, new_token(), self.spec)
        everything = mx.arange(len(self.keys), dtype=mx.int32)
        got = kv_gather(everything, keys, values, token, self.spec)[:2]
        error = 0.0
        for array, row, source_rows in zip(got, self.formats, self.drawn, strict=True):
            expected = np.zeros_like(source_rows)
            expected[target[target >= 0]] = source_rows[target[target >= 0]]
            error = max(error, largest_error(array, expected, _lost(row, expected)))
        return error, 1.0 if self.shape.kv_bits else 0.0

    def gather(self) -> tuple[float, float]:
        """Two rows of slots in random order."""
        slots = np.random.default_rng(1).choice(self.owned, (2, 37)).astype(np.int32)
        got = kv_gather(mx.array(slots), *self._store(), new_token(), self.spec)[:2]
        pairs = zip(got, (self.keys, self.values), strict=True)
        error = max(largest_error(a, rows[slots]) for a, rows in pairs)
        return error, TOLERANCE[self.shape.dtype] if self.shape.kv_bits else 0.0

    def decode(self, plan: DecodePlan) -> tuple[float, float]:
        """One query per sequence."""
        batch = self.decodes
        q = self.q[: batch.num_tokens]
        out, _ = paged_decode(
            self._array(q), mx.array(batch.block_tables), mx.array(batch.seq_lens),
            *self._store(), new_token(), plan=plan, spec=self.spec, **self._how(),
        )  # fmt: skip
        return self._compare(batch, q, out)

    def prefill(self) -> tuple[float, float]:
        """Whole prompts and chunks, with one row of padding."""
        batch, q = self.prompts, np.concatenate([self.q, self.q[:1]])
        tiles = plan_tiles(
            batch.cu_seqlens_q, len(q), self.shape.num_heads // self.shape.num_kv_heads
        )
        out, _ = varlen_prefill(
            self._array(q), mx.array(batch.block_tables), mx.array(batch.cu_seqlens_q),
            mx.array(batch.seq_lens), mx.array(tiles), *self._store(), new_token(), **self._how(),
        )  # fmt: skip
        return self._compare(batch, self.q, out[:-1])

    def shared(self) -> tuple[float, float]:
        """One query per sequence, all sequences being beginnings of the longest.  The two longest
        share the shorter one's blocks, except its last."""
        tables = np.repeat(self.decodes.block_tables[-1:], len(_CONTEXTS), axis=0)
        batch = replace(self.decodes, block_tables=tables)
        prefix_len = (_CONTEXTS[-2] - 1) // self.block_size * self.block_size
        lens = np.where(prefix_len < _CONTEXTS, prefix_len, 0).astype(np.int32)
        q = self.q[: batch.num_tokens]
        how, store = self._how(), self._store()
        sinks, _ = how.pop("sinks"), how.pop("window")
        prefix = shared_prefix(
            self._array(q), mx.array(tables), mx.array(batch.seq_lens),
            mx.array([len(tables) - 1], mx.int32), mx.array(lens), *store, new_token(),
            splits=4, **how,
        )  # fmt: skip
        out, _ = paged_decode(
            self._array(q), mx.array(tables), mx.array(batch.seq_lens), *store, prefix.lse,
            plan=DecodePlan(1, 8), prefix=prefix, sinks=sinks, **how,
        )  # fmt: skip
        return self._compare(batch, q, out)

    def _store(self) -> tuple[mx.array, mx.array]:
        rows = zip(self.formats, self.kept, strict=True)
        keys, values = (mx.array(kept).astype(row.kept_dtype) for row, kept in rows)
        return keys, values

    def _how(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "scale": self._scale,
            "window": self.shape.window,
            "softcap": self.shape.softcap,
            "sinks": None if self.sinks is None else mx.array(self.sinks),
        }

    def _compare(self, batch: ForwardBatch, q: np.ndarray, out: mx.array) -> tuple[float, float]:
        return largest_error(out, self._expected(batch, q)), TOLERANCE[self.shape.dtype]

    @property
    def _scale(self) -> float:
        return self.shape.k_head_dim**-0.5

    def _expected(self, batch: ForwardBatch, q: np.ndarray) -> np.ndarray:
        """The reference, in float32 on the CPU of this machine."""
        s = self.shape
        with mx.stream(mx.cpu):
            spec = LayerSpec(s.num_kv_heads, s.k_head_dim, s.v_head_dim, mx.float32)
            store = PagedStore([spec], self.num_blocks, self.block_size)
            store.keys, store.values = [mx.array(self.keys)], [mx.array(self.values)]
            attention = ReferenceAttention(store)
            step = attention.prepare(batch, batch.num_tokens)
            how = self._how()
            del how["block_size"]
            bound = attention.begin(step, attention.new_state())
            return np.array(bound.attend(0, mx.array(q), **how))


def _lost(row: RowFormat, values: np.ndarray) -> np.ndarray | None:
    """The largest change by quantisation of each value: half a step, plus rounding to the dtype.

    None: rows of this format are not quantised.
    """
    if row.bits is None:
        return None
    groups = values.reshape(*values.shape[:-1], -1, row.group_size)
    step = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / ((1 << row.bits) - 1)
    rounding = TOLERANCE[row.dtype] * (1 + np.abs(groups))
    return (0.5 * step + rounding).reshape(values.shape)
