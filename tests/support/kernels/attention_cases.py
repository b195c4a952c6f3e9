"""Steps for the kernels that attend, and their results by definition in float64.

NaN is wherever a kernel must not read.
"""

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from tests.support.attention.oracle import paged_attention, slots_of
from tests.support.kernels.arrays import TOLERANCE, draw, from_store, in_store
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.rope_write import NewRows
from vllm_metal_lite.kernels.shared_prefix import SharedPrefixResult, shared_prefix
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.kv.store import LayerSpec

# The keys of each sequence: a single one, none, whole blocks, and one more than whole blocks.
RAGGED = [1, 16, 0, 33, 7, 100]


def permuted_blocks(
    rng: np.random.Generator, seq_lens: np.ndarray, block_size: int
) -> tuple[np.ndarray, int]:
    """Block tables, and the slots of their store; two blocks have no owner."""
    counts = -(-seq_lens // block_size)
    free = rng.permutation(counts.sum() + 2).astype(np.int32)
    tables = np.zeros((len(counts), counts.max(initial=1)), np.int32)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = free[:-2]
    return tables, len(free) * block_size


def poisoned_store(
    rng: np.random.Generator,
    spec: LayerSpec,
    tables: np.ndarray,
    seq_lens: np.ndarray,
    slots: int,
    block_size: int,
    first: np.ndarray | int = 0,
) -> tuple[list[mx.array], list[np.ndarray]]:
    """K and V as a store keeps them, and their values.  NaN is where no sequence has a key, or only
    one before its `first`."""
    readable = np.zeros(slots, bool)
    begins = np.broadcast_to(np.maximum(first, 0), seq_lens.shape)
    for table, begin, end in zip(tables, begins, seq_lens, strict=True):
        readable[slots_of(table, np.arange(begin, end), block_size)] = True
    kept, values = [], []
    for row in (spec.k_row, spec.v_row):
        drawn = draw(rng, slots, spec.num_kv_heads, row.dim, dtype=spec.dtype)
        drawn[~readable] = np.nan
        kept.append(in_store(row, drawn))
        values.append(from_store(row, kept[-1]))
    return kept, values


def positions_of(cu_seqlens_q: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """The position of each packed row."""
    to_position = np.repeat(seq_lens - cu_seqlens_q[1:], np.diff(cu_seqlens_q))
    return np.arange(cu_seqlens_q[-1]) + to_position


def spans_of(
    cu_seqlens_q: np.ndarray, seq_lens: np.ndarray, spans: Sequence[tuple[int, int, int]]
) -> np.ndarray:
    """PictureRows.spans.  spans: (segment, first, end) of positions that see each other."""
    position = positions_of(cu_seqlens_q, seq_lens)
    segments = np.repeat(np.arange(len(seq_lens)), np.diff(cu_seqlens_q))
    found = np.stack([position, position + 1], axis=1).astype(np.int32)
    for segment, first, end in spans:
        found[(segments == segment) & (position >= first) & (position < end)] = first, end
    return found


def segments_of(most_rows: int, most_before: int) -> st.SearchStrategy[tuple[int, int]]:
    """A strategy for the (rows, keys) of a segment, often without keys before its rows."""
    before = st.integers(0, most_before) | st.just(0)
    return st.tuples(st.integers(1, most_rows), before).map(lambda s: (s[0], s[0] + s[1]))


class AttentionCase:
    """Segments (rows of this step, keys) packed, `padding` rows after them, blocks permuted over a
    store that is poisoned wherever no row may read.  Rows of padding are NaN too.

    spans: (segment, first, end) of positions that see each other."""

    def __init__(
        self,
        segments,
        *,
        heads=(4, 2),
        dim=32,
        v_dim=None,
        dtype=mx.float32,
        block_size=16,
        window=None,
        softcap=None,
        sinks=False,
        padding=3,
        seed=0,
        bits=None,
        spans=(),
    ) -> None:
        self.rng = rng = np.random.default_rng(seed)
        q_lens, self.seq_lens = np.array(segments, np.int32).reshape(-1, 2).T
        self.cu_seqlens_q = np.append(0, np.cumsum(q_lens)).astype(np.int32)
        self.dtype, self.heads, self.padding = dtype, heads, padding
        self.spec = LayerSpec(heads[1], dim, v_dim or dim, dtype, bits=bits)
        self.block_size, self.how = block_size, {"scale": dim**-0.5}
        self.how |= {"window": window, "softcap": softcap}
        self.q = self.draw_rows(dim)
        self.sinks = 2 * draw(rng, heads[0], dtype=dtype) if sinks else None
        self.block_tables, slots = self.draw_blocks(block_size)
        where = self.block_tables, self.seq_lens, slots, block_size
        seen = self.seq_lens - q_lens - window + 1 if window else np.zeros_like(q_lens)
        self.positions = positions_of(self.cu_seqlens_q, self.seq_lens)
        self.spans = spans_of(self.cu_seqlens_q, self.seq_lens, spans) if spans else None
        if spans:
            seen = np.minimum(seen, self.spans[self.cu_seqlens_q[:-1], 0])
        self.store, self.values = poisoned_store(rng, self.spec, *where, seen)

    def layer(self, ticket: mx.array, store: list[mx.array] | None = None) -> LayerStore:
        return LayerStore(*(store or self.store), ticket, self.spec, self.block_size)

    def draw_rows(self, dim: int) -> np.ndarray:
        """Parts of queries."""
        count = self.cu_seqlens_q[-1]
        rows = draw(self.rng, count + self.padding, self.heads[0], dim, dtype=self.dtype)
        rows[count:] = np.nan
        return rows

    def draw_blocks(self, block_size: int) -> tuple[np.ndarray, int]:
        return permuted_blocks(self.rng, self.seq_lens, block_size)

    def queries(self) -> mx.array:
        return mx.array(self.q).astype(self.dtype)

    def scores(self) -> Scores:
        return Scores(sinks=None if self.sinks is None else mx.array(self.sinks), **self.how)

    def floats(self, out: mx.array) -> np.ndarray:
        assert out.dtype == self.dtype
        return np.array(out.astype(mx.float32))

    def expected(self) -> np.ndarray:
        where = self.block_tables, self.cu_seqlens_q, self.seq_lens
        how = {"sinks": self.sinks, "block_size": self.block_size, "spans": self.spans, **self.how}
        return paged_attention(self.q, *self.values, *where, **how)

    def check(self, **how) -> None:
        got, (atol, rtol) = self.run(**how), TOLERANCE[self.dtype]
        np.testing.assert_allclose(got, self.expected(), rtol, atol)
        assert not got[len(got) - self.padding :].any()

    def check_padding(self, **how) -> None:
        """A step's arrays are padded to buckets: segments without rows, rows without a segment."""
        self.cu_seqlens_q = np.pad(self.cu_seqlens_q, (0, 3), mode="edge")
        self.seq_lens = np.pad(self.seq_lens, (0, 3))
        self.block_tables = np.pad(self.block_tables, ((0, 3), (0, 0)))
        self.check(**how)
        self.cu_seqlens_q[:] = 0
        assert not self.run(**how).any()

    def check_chunks(self, split: int, chunk: Callable[[int, int], "AttentionCase"]) -> None:
        """Check that a segment in two chunks gives the same bits as at once.  chunk: its rows,
        keys."""
        expected, end = self.run(), len(self.q)
        for begin, until in ((0, split), (split, end)):
            part = chunk(until - begin, until)
            part.store, part.block_tables = self.store, self.block_tables
            for name in ("q", "q_pe"):
                if hasattr(self, name):
                    setattr(part, name, getattr(self, name)[begin:until])
            np.testing.assert_array_equal(part.run(), expected[begin:until])


class PagedSequences(AttentionCase):
    """Decodes of seq_lens keys; a length of 0 is a row of padding."""

    def __init__(self, seq_lens, *, plan=(1, 4), **how) -> None:
        super().__init__([(1, n) for n in seq_lens], padding=0, **how)
        self.plan = plan

    def run(self) -> np.ndarray:
        return self.floats(self.attend(self.queries(), self.store, new_ticket())[0])

    def attend(
        self,
        q: mx.array | NewRows,
        store: list[mx.array],
        ticket: mx.array,
        prefix: SharedPrefixResult | None = None,
    ) -> tuple[mx.array, mx.array]:
        """The results of paged_decode."""
        where = mx.array(self.block_tables), mx.array(self.seq_lens)
        where, plan = (*where, self.layer(ticket, store), self.scores()), DecodePlan(*self.plan)
        return paged_decode(q, *where, plan=plan, prefix=prefix)

    def attend_to_prefix(
        self,
        q: mx.array | NewRows,
        lens: np.ndarray,
        store: list[mx.array],
        ticket: mx.array,
        splits: int = 2,
    ) -> SharedPrefixResult:
        """The results of shared_prefix: the first `lens` keys of each row, which are in the same
        blocks."""
        leader = mx.array([int(np.argmax(lens))], mx.int32)
        where = mx.array(self.block_tables), leader, mx.array(lens)
        return shared_prefix(q, *where, self.layer(ticket, store), self.scores(), splits=splits)
