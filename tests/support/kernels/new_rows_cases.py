"""Rows of q, k and v before norm, rotation and write, and what becomes of them, in float64."""

import numpy as np

from tests.support.kernels.arrays import TOLERANCE, from_store, in_store, rounded
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns, RMSNorm, Rope
from vllm_metal_lite.kernels.rope_write import NewRows, rope_write
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.kv.store import LayerSpec

SLOTS = 40


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
                self.norms[name] = RMSNorm(weight if name in norms else None, 0.03)
        self.columns = self._join(rng) if joined else self._apart()

    def _join(self, rng) -> list[Columns]:
        """q, k and v in one array, in any order, with gaps before, between and after them."""
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
        where = mx.array(self.positions)
        return NewRows(*self.columns, self.heads[0], self.rope, *norms, where)

    def launch(self) -> list[mx.array]:
        """q, and the store; nothing was written before."""
        formats = self.spec.k_row, self.spec.v_row
        store = [in_store(r, np.full((SLOTS, self.heads[1], r.dim), np.nan)) for r in formats]
        mx.eval(store)
        layer = LayerStore(*store, new_ticket(), self.spec)
        q, ticket = rope_write(self.new_rows, mx.array(self.slots), layer)
        mx.eval(ticket)
        assert q.dtype == self.dtype
        return [q, *store]

    def run(self) -> list[np.ndarray]:
        """q, and the values that the store represents."""
        q, *store = self.launch()
        kept = map(from_store, (self.spec.k_row, self.spec.v_row), store)
        return [np.array(q.astype(mx.float32)), *kept]

    def result(self, name: str) -> mx.Dtype:
        """The type of q or k after its norm."""
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
