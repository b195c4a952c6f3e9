"""Arrays for kernels on the CPU host, and what they should compute, in float64.

NaN is wherever a kernel must not read.
"""

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from tests.support.attention.oracle import paged_attention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import LayerStore, RMSNorm, new_ticket
from vllm_metal_lite.kernels.decode import DecodePlan, paged_decode
from vllm_metal_lite.kernels.new_rows import Columns, NewRows, Rope
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.kernels.shared_prefix import SharedPrefixResult, shared_prefix
from vllm_metal_lite.kv.row_format import RowFormat
from vllm_metal_lite.kv.store import LayerSpec

# (absolute, relative).  Measured: float32 at most 3e-7, float16 3e-4, bfloat16 3e-3.
TOLERANCE = {mx.float32: (1e-5, 1e-5), mx.float16: (2e-3, 2e-3), mx.bfloat16: (1.5e-2, 1e-2)}
# The inputs that kernels write to.
STORE = ("keys", "values")
# Keys of each sequence: the first token of all, an empty row, whole blocks, and the first token of
# a block.
RAGGED = [1, 16, 0, 33, 7, 100]
SLOTS = 40


def draw(rng: np.random.Generator, *shape: int, dtype: mx.Dtype = mx.float32) -> np.ndarray:
    """Normal floats that `dtype` holds exactly."""
    return np.array(normal(rng, *shape, dtype=dtype).astype(mx.float32))


def normal(rng: np.random.Generator, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def raw(array: mx.array) -> np.ndarray:
    """The bits of an array."""
    return np.array(array.view({2: mx.uint16, 4: mx.uint32}[array.dtype.size]))


def rounded(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Every number as `dtype` holds it."""
    return np.array(mx.array(values.astype(np.float32)).astype(dtype).astype(mx.float32))


def in_store(row: RowFormat, values: np.ndarray) -> mx.array:
    """Rows as a store of this format keeps them; one of NaN has scales that are NaN."""
    kept = row.pack(mx.array(values).astype(row.dtype))
    if row.bits is None:
        return kept
    return mx.where(mx.array(np.isnan(values).any(-1, keepdims=True)), 0xFFFFFFFF, kept)


def from_store(row: RowFormat, kept: mx.array) -> np.ndarray:
    """The values that stored rows represent."""
    return np.array(row.unpack(kept).astype(mx.float32))


def powers_of_two(count: int) -> np.ndarray:
    """Frequencies that make every angle exact in float32."""
    return np.exp2(np.arange(count) % 12).astype(np.float32)


def turned(x: np.ndarray, positions: np.ndarray, rope: Rope, dtype: mx.Dtype) -> np.ndarray:
    """Heads rotated by definition: pairs are complex numbers, and a rotation is a product.  The
    factor before it is rounded to the type, and so is what it gives."""
    x, i = x.copy(), np.arange(rope.dims // 2)
    if rope.factor != 1:
        factor = rounded(np.array(rope.factor), dtype)
        x[..., : rope.dims] = rounded(factor * x[..., : rope.dims], dtype)
    given = rope.freqs is not None
    rates = 1 / np.array(rope.freqs) if given else rope.base ** (-2.0 * i / rope.dims)
    turn = np.exp(1j * rope.scale * positions[:, None, None] * rates)
    at = (2 * i, 2 * i + 1) if rope.traditional else (i, i + rope.dims // 2)
    pairs = (x[..., at[0]] + 1j * x[..., at[1]]) * turn
    x[..., at[0]], x[..., at[1]] = pairs.real, pairs.imag
    return x


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
        at = np.arange(begin, end)
        readable[table[at // block_size] * block_size + at % block_size] = True
    kept, values = [], []
    for row in (spec.k_row, spec.v_row):
        drawn = draw(rng, slots, spec.num_kv_heads, row.dim, dtype=spec.dtype)
        drawn[~readable] = np.nan
        kept.append(in_store(row, drawn))
        values.append(from_store(row, kept[-1]))
    return kept, values


def segments_of(most_rows: int, most_before: int) -> st.SearchStrategy[tuple[int, int]]:
    """(rows, keys) of a segment, often without keys before its rows."""
    before = st.integers(0, most_before) | st.just(0)
    return st.tuples(st.integers(1, most_rows), before).map(lambda s: (s[0], s[0] + s[1]))


class AttentionCase:
    """Segments (rows of this step, keys) packed, `padding` rows after them, blocks permuted over a
    store that is poisoned wherever no row may read.  Rows of padding are NaN too."""

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
        seen = self.seq_lens - q_lens - window + 1 if window else 0
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

    def sinks_of_heads(self) -> mx.array | None:
        return None if self.sinks is None else mx.array(self.sinks)

    def floats(self, out: mx.array) -> np.ndarray:
        assert out.dtype == self.dtype
        return np.array(out.astype(mx.float32))

    def expected(self) -> np.ndarray:
        where = self.block_tables, self.cu_seqlens_q, self.seq_lens
        how = {"sinks": self.sinks, "block_size": self.block_size, **self.how}
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
        """The only segment in two chunks gives the same bits as at once.  chunk: of rows, keys."""
        expected, end = self.run(), len(self.q)
        for begin, until in ((0, split), (split, end)):
            part = chunk(until - begin, until)
            part.store, part.block_tables = self.store, self.block_tables
            for name in ("q", "q_pe"):
                if hasattr(self, name):
                    setattr(part, name, getattr(self, name)[begin:until])
            np.testing.assert_array_equal(part.run(), expected[begin:until])


class PagedSequences(AttentionCase):
    """Decodes of seq_lens keys; one without keys is a row of padding."""

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
        """By paged_decode."""
        where = mx.array(self.block_tables), mx.array(self.seq_lens)
        how = {"plan": DecodePlan(*self.plan), "sinks": self.sinks_of_heads(), "prefix": prefix}
        return paged_decode(q, *where, self.layer(ticket, store), **how, **self.how)

    def attend_to_prefix(
        self,
        q: mx.array | NewRows,
        lens: np.ndarray,
        store: list[mx.array],
        ticket: mx.array,
        splits: int = 2,
    ) -> SharedPrefixResult:
        """By shared_prefix: the first `lens` keys of each row, which are in the same blocks."""
        leader = mx.array([int(np.argmax(lens))], mx.int32)
        where = mx.array(self.block_tables), mx.array(self.seq_lens), leader, mx.array(lens)
        how = {name: self.how[name] for name in ("scale", "softcap")}
        return shared_prefix(q, *where, self.layer(ticket, store), splits=splits, **how)


class NewRowsCase:
    """Rows of q, k and v in one array or in three, some of them without a slot."""

    def __init__(
        self,
        positions,
        *,
        heads=(4, 2),
        dims=(32, 32),
        rotated=32,
        traditional=False,
        base=10_000.0,
        scale=1.0,
        freqs=False,
        norms="qk",
        weight_dtype=None,
        joined=True,
        dtype=mx.float32,
        seed=0,
        slots=None,
        bits=None,
        factor=1.0,
    ) -> None:
        rng = np.random.default_rng(seed)
        rows = len(positions)
        self.dtype, self.heads, self.scale = dtype, heads, scale
        self.spec = LayerSpec(heads[1], *dims, dtype, bits=bits)
        self.positions = np.array(positions, np.int32)
        if slots is None:
            slots = rng.permutation(SLOTS)[:rows].astype(np.int32)
            slots[rng.random(rows) < 0.3] = -1
        self.slots = slots
        shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])
        self.q, self.k, self.v = (
            rounded(rng.standard_normal((rows, *shape)), dtype) for shape in shapes
        )
        self.k[self.slots < 0] = self.v[self.slots < 0] = np.nan
        self.rope = None
        if rotated:
            given = mx.array(powers_of_two(rotated // 2)) if freqs else None
            self.rope = Rope(rotated, traditional, None if freqs else base, scale, given, factor)
        # "qk": both are normalised; upper case: without a weight.
        self.norms = {}
        for name in "qk":
            if name in norms.lower():
                weight = mx.array(rng.uniform(0.5, 1.5, dims[0]).astype(np.float32))
                weight = weight.astype(weight_dtype or dtype)
                self.norms[name] = RMSNorm(weight if name in norms else None, 1e-5)
        self.columns = self._join(rng) if joined else self._apart()

    def _join(self, rng) -> list[Columns]:
        """Heads side by side, in any order, with a gap before each part and behind the last."""
        pieces, starts, at = [], {}, 0
        for name in rng.permutation(["q", "k", "v"]):
            gap = int(rng.integers(0, 3)) * 4
            part = getattr(self, name).reshape(len(self.q), -1)
            pieces += [np.full((len(part), gap), np.nan), part]
            starts[name], at = at + gap, at + gap + part.shape[1]
        pieces.append(np.full((len(self.q), 4), np.nan))
        array = mx.array(np.concatenate(pieces, 1).astype(np.float32)).astype(self.dtype)
        return [Columns(array, starts[name]) for name in "qkv"]

    def _apart(self) -> list[Columns]:
        arrays = (getattr(self, name).reshape(len(self.q), -1) for name in "qkv")
        return [Columns(mx.array(a).astype(self.dtype), 0) for a in arrays]

    @property
    def new_rows(self) -> NewRows:
        norms = self.norms.get("q"), self.norms.get("k")
        return NewRows(*self.columns, self.heads[0], self.rope, *norms)

    def launch(self) -> list[mx.array]:
        """q, and the store, which nothing wrote before."""
        formats = self.spec.k_row, self.spec.v_row
        store = [in_store(r, np.full((SLOTS, self.heads[1], r.dim), np.nan)) for r in formats]
        mx.eval(store)
        where = mx.array(self.positions), mx.array(self.slots)
        layer = LayerStore(*store, new_ticket(), self.spec)
        q, ticket = rope_write(self.new_rows, *where, layer)
        mx.eval(ticket)
        assert q.dtype == self.dtype
        return [q, *store]

    def run(self) -> list[np.ndarray]:
        """q, and the values that the store represents."""
        q, *store = self.launch()
        kept = map(from_store, (self.spec.k_row, self.spec.v_row), store)
        return [np.array(q.astype(mx.float32)), *kept]

    def result(self, name: str) -> mx.Dtype:
        """The type of q or k behind its norm."""
        weight = self.norms[name].weight if name in self.norms else None
        return self.dtype if weight is None else mx.result_type(weight, self.columns[0].array)

    def normed(self, name: str) -> np.ndarray:
        """q or k, normalised in float64 and rounded where mx.fast.rms_norm rounds."""
        x, result = getattr(self, name).astype(np.float64), self.result(name)
        norm = self.norms.get(name)
        if norm is None:
            return x
        weight = mx.array(1, self.dtype) if norm.weight is None else norm.weight
        x = rounded(x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps), result)
        return rounded(x * np.array(weight.astype(mx.float32)), result).astype(np.float64)

    def rotated(self, name: str) -> np.ndarray:
        x = self.normed(name)
        return x if self.rope is None else turned(x, self.positions, self.rope, self.result(name))

    def expected(self) -> list[np.ndarray]:
        written = self.slots >= 0
        expected = [self.rotated("q")]
        for rows in (self.rotated("k"), self.v):
            store = np.full((SLOTS, *rows.shape[1:]), np.nan)
            store[self.slots[written]] = rows[written]
            expected.append(store)
        return expected

    def check(self) -> None:
        atol, rtol = TOLERANCE[self.dtype]
        for got, wanted in zip(self.run(), self.expected(), strict=True):
            np.testing.assert_allclose(got, wanted, rtol, atol)
