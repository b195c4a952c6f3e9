"""Steps of given segments over a filled store, and what attention to them is by definition."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.support.attention.oracle import paged_attention, slots_of
from tests.support.engine.batches import Segment, own_blocks, pack
from tests.support.engine.poison import poison
from tests.support.kernels.arrays import floats, normal
from tests.support.kernels.attention_cases import spans_of
from tests.support.kernels.device import change_device
from vllm_metal_lite.attention.base import Attention, AttentionCall, StepAttention
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.batch.pictures import NO_FEATURE, PictureRows
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.specs import AttentionShape

BLOCK_SIZE = 8
PREFILLS = "varlen", "gather"

TOLERANCE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}


def make_batch(segments: Sequence[Segment], seed: int = 0) -> ForwardBatch:
    """The segments, decodes first; block tables are a permutation."""
    segments = sorted(segments, key=lambda s: s[1] > 1)
    blocks = own_blocks(segments, BLOCK_SIZE, seed)
    batch = pack(segments, blocks, block_size=BLOCK_SIZE)
    batch.validate(sum(map(len, blocks)))
    return batch


def expected_pairs(
    batch: ForwardBatch, window: int | None, chunk: int | None = None
) -> dict[int, list[int]]:
    """By definition: the slots that each row sees, in order of position."""
    seen = {}
    for s, length in enumerate(batch.seq_lens.tolist()):
        table = batch.block_tables[0, s]
        for row in range(batch.cu_seqlens_q[s], batch.cu_seqlens_q[s + 1]):
            position = int(batch.positions[row])
            start = 0 if window is None else max(0, position - window + 1)
            start = start if chunk is None else max(start, position // chunk * chunk)
            assert position < length
            at = np.arange(start, position + 1)
            seen[row] = slots_of(table, at, BLOCK_SIZE).tolist()
    return seen


def begin(attention: Attention, batch: ForwardBatch, num_rows: int) -> StepAttention:
    """A batch's pass over the layers, as the first step of an engine."""
    return attention.begin(attention.prepare(batch, num_rows), attention.new_state())


class Case:
    """A filled store and the queries of one step, exact in `dtype`; to be run with one window.

    spans: (segment, first, end) of positions that see each other; only_windowed: as in PictureRows.
    """

    def __init__(
        self,
        segments,
        *,
        heads=4,
        kv_heads=2,
        dim=32,
        v_dim=None,
        dtype=mx.float32,
        sinks=False,
        seed=0,
        bits=None,
        spans=(),
        only_windowed=False,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.batch, self.dtype = make_batch(segments, seed), dtype
        if spans:
            cu_seqlens_q, rows = self.batch.cu_seqlens_q, self.batch.num_tokens
            seen = spans_of(cu_seqlens_q, self.batch.seq_lens, spans)
            none = np.full(rows, NO_FEATURE, np.int32)
            pictures = PictureRows(none, None, spans=seen, only_windowed=only_windowed)
            self.batch = replace(self.batch, pictures=pictures)
        self.scale = dim**-0.5
        self.shapes = [AttentionShape(heads, kv_heads, dim, v_dim or dim, dtype)]
        num_blocks = int(self.batch.block_tables.max()) + 2
        slots = (num_blocks + 1) * BLOCK_SIZE
        draw = partial(normal, rng, dtype=dtype)
        self.q = draw(self.batch.num_tokens, heads, dim)
        self.k, self.v = draw(slots, kv_heads, dim), draw(slots, kv_heads, v_dim or dim)
        self.sinks = 2 * draw(heads) if sinks else None
        spec = LayerSpec(kv_heads, dim, v_dim or dim, dtype, bits=bits)
        self.store = PagedStore([spec], num_blocks, BLOCK_SIZE)
        every = mx.arange(slots)
        self.store.write(0, self.k, self.v, every)
        self.k, self.v = spec.k_row.rounded(self.k), spec.v_row.rounded(self.v)
        self.attention = ReferenceAttention(self.store)

    def run(self, padding: int = 0, **how) -> np.ndarray:
        """NaN in every slot that no row sees."""
        n, b = self.batch.num_tokens, self.batch
        seen = np.zeros(len(self.k), bool)
        first = b.seq_lens - np.diff(b.cu_seqlens_q) + 1 - (how.get("window") or 1 << 20)
        for table, start, end in zip(b.block_tables[0], first, b.seq_lens, strict=True):
            seen[slots_of(table, np.arange(max(start, 0), end), BLOCK_SIZE)] = True
        poison(self.store, [seen])
        step = begin(self.attention, self.batch, n + padding)
        q = mx.concatenate([self.q, mx.full((padding, *self.q.shape[1:]), 7, self.dtype)])
        out = step.attend(q, AttentionCall(0, Scores(self.scale, sinks=self.sinks, **how)))
        assert out.shape == (n + padding, self.q.shape[1], self.v.shape[2])
        assert out.dtype == self.dtype
        return np.array(out[:n].astype(mx.float32))

    def expected(self, window: int | None = None, softcap: float | None = None) -> np.ndarray:
        q, k, v = map(floats, (self.q, self.k, self.v))
        b, sinks = self.batch, self.sinks
        how = {"scale": self.scale, "window": window, "softcap": softcap}
        how |= {"sinks": None if sinks is None else floats(sinks)}
        how |= {"spans": b.pictures and b.pictures.spans_of(window)}
        return paged_attention(
            q, k, v, b.block_tables[0], b.cu_seqlens_q, b.seq_lens, block_size=BLOCK_SIZE, **how
        )


class KernelCase(Case):
    """A case of the reference's own tests, through kernels; the window is the layer's own."""

    rows_as_decodes = 0

    def __init__(self, *args, prefill="gather", **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.prefill = prefill

    def run(self, padding: int = 0, **how) -> np.ndarray:
        self.store.specs = [replace(self.store.specs[0], window=how.get("window"))]
        self.attention = KernelAttention(self.store, self.prefill, self.shapes)
        with pytest.MonkeyPatch.context() as patch:
            change_device(patch, rows_as_decodes=self.rows_as_decodes)
            return super().run(padding, **how)


def check(case: Case, padding: int = 0, **how) -> None:
    got, expected = case.run(padding, **how), case.expected(**how)
    error = np.abs(got - expected).max() / max(1.0, np.abs(expected).max())
    assert error < TOLERANCE[case.dtype], error


RAGGED = [(0, 1), (17, 1), (30, 1), (0, 13), (0, 13), (0, 30), (21, 9), (8, 25)]
