"""rope_write on the CPU host, against float64 and against MLX's own norm and rotation.

NaN is in columns that belong to no head, in keys and values of rows without a slot, and in the
store before.  The checker watches for races and for accesses out of bounds.
"""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal.host import compiler_available, installed
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import rope_write as rope
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.new_rows import Columns, HeadNorm, NewRows, Rope
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.specs import AttentionShape

pytestmark = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")

TOLERANCE = {mx.float32: (1e-5, 1e-5), mx.float16: (2e-3, 2e-3), mx.bfloat16: (1.5e-2, 1e-2)}
STORE = ("keys", "values")
SLOTS = 40


@pytest.fixture(scope="module", autouse=True)
def host():
    with installed(checked=True, schedule=3, writable_inputs=STORE):
        yield


def rounded(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Every number as `dtype` holds it."""
    return np.array(mx.array(values.astype(np.float32)).astype(dtype).astype(mx.float32))


def powers_of_two(count: int) -> np.ndarray:
    """Frequencies that make every angle exact in float32."""
    return np.exp2(np.arange(count) % 12).astype(np.float32)


class Case:
    """Rows of q, k and v in one array or in three, some of them without a slot."""

    def __init__(
        self, positions, *, heads=(4, 2), dims=(32, 32), rotated=32, traditional=False,
        base=10_000.0, scale=1.0, freqs=False, norms="qk", weight_dtype=None, joined=True,
        dtype=mx.float32, seed=0, slots=None,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        rows = len(positions)
        self.dtype, self.heads, self.scale = dtype, heads, scale
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
        self.freqs = powers_of_two(rotated // 2) if freqs else None
        self.rope = None
        if rotated:
            self.rope = Rope(
                rotated, traditional, None if freqs else base, scale,
                mx.array(self.freqs) if freqs else None,
            )  # fmt: skip
        # "qk": both are normalised; upper case: without a weight.
        self.norms = {}
        for name in "qk":
            if name in norms.lower():
                weight = mx.array(rng.uniform(0.5, 1.5, dims[0]).astype(np.float32))
                weight = weight.astype(weight_dtype or dtype)
                self.norms[name] = HeadNorm(weight if name in norms else None, 1e-5)
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

    def run(self) -> list[np.ndarray]:
        """q, and the store, of which nothing was written before."""
        kv_heads = self.heads[1]
        store = [
            mx.full((SLOTS, kv_heads, a.shape[2]), float("nan"), self.dtype)
            for a in (self.k, self.v)
        ]
        mx.eval(store)
        q, token = rope_write(
            self.new_rows, positions=mx.array(self.positions), slot_mapping=mx.array(self.slots),
            keys=store[0], values=store[1], token=new_token(),
        )  # fmt: skip
        mx.eval(token)
        assert q.dtype == self.dtype
        return [np.array(a.astype(mx.float32)) for a in (q, *store)]

    def normed(self, name: str) -> np.ndarray:
        """q or k, normalised in float64 and rounded where mx.fast.rms_norm rounds."""
        x = getattr(self, name).astype(np.float64)
        norm = self.norms.get(name)
        if norm is None:
            return x
        weight = mx.array(1, self.dtype) if norm.weight is None else norm.weight
        result = mx.result_type(weight, self.columns[0].array)
        x = rounded(x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps), result)
        return rounded(x * np.array(weight.astype(mx.float32)), result).astype(np.float64)

    def rotated(self, name: str) -> np.ndarray:
        """By definition: pairs are complex numbers, and a rotation is a product."""
        x = self.normed(name)
        if self.rope is None:
            return x
        dims = self.rope.dims
        i = np.arange(dims // 2)
        rates = 1 / self.freqs if self.rope.base is None else self.rope.base ** (-2.0 * i / dims)
        turn = np.exp(1j * self.scale * self.positions[:, None, None] * rates)
        at = (2 * i, 2 * i + 1) if self.rope.traditional else (i, i + dims // 2)
        turned = (x[..., at[0]] + 1j * x[..., at[1]]) * turn
        x[..., at[0]], x[..., at[1]] = turned.real, turned.imag
        return x

    def expected(self) -> list[np.ndarray]:
        written = self.slots >= 0
        expected = [self.rotated("q")]
        for rows in (self.rotated("k"), self.v):
            store = np.full((SLOTS, *rows.shape[1:]), np.nan)
            store[self.slots[written]] = rows[written]
            expected.append(store)
        return expected


def check(*args, **kwargs) -> None:
    case = Case(*args, **kwargs)
    atol, rtol = TOLERANCE[case.dtype]
    for got, wanted in zip(case.run(), case.expected(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol, atol)


FEW = [0, 1, 5, 13, 2, 40]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"traditional": True},
        {"rotated": 0},
        {"rotated": 12},
        {"rotated": 2, "traditional": True},
        {"freqs": True, "scale": 0.5},
        {"norms": ""},
        {"norms": "QK"},
        {"norms": "q"},
        {"norms": "k", "rotated": 0},
        {"weight_dtype": mx.float32},
        {"joined": False},
        {"base": 1e6, "scale": 0.25},
    ],
    ids=str,
)
def test_every_way_of_rotating(how, dtype):
    check(FEW, dtype=dtype, **how)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "dims", [(32, 32), (72, 72), (80, 40), (128, 128), (192, 128), (256, 256), (576, 512)], ids=str
)
def test_head_sizes(dims, dtype):
    for rotated in (dims[0] // 4 * 2, dims[0]):
        check(FEW, dims=dims, rotated=rotated, dtype=dtype)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=9),
    st.sampled_from([(1, 1), (4, 4), (6, 2), (7, 1), (24, 2)]),
    st.sampled_from([(32, 32), (40, 64), (64, 40), (72, 72)]),
    st.integers(0, 16),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "q", "k", "qk", "QK"]),
    st.booleans(),
    st.integers(0, 9),
)
@settings(max_examples=40)
def test_random_rows(positions, heads, dims, pairs, traditional, freqs, norms, joined, seed):
    check(positions, heads=heads, dims=dims, rotated=2 * pairs, traditional=traditional,
          freqs=freqs, norms=norms, joined=joined, seed=seed)  # fmt: skip


@pytest.mark.parametrize("heads", [(6, 2), (3, 1)], ids=str)
def test_long_prompts_take_several_heads_a_simdgroup(heads, monkeypatch):
    monkeypatch.setattr(rope, "_MANY_ROWS", 4)
    check(list(range(7)), heads=heads)


@pytest.mark.parametrize("position", [100_000, 1_000_000])
def test_angles_of_large_positions(position):
    """Exact angles: what is left is the error of the sines, of which there is hardly any."""
    check([position - 1, position], freqs=True, norms="", dims=(64, 64), rotated=64)


def test_large_positions_give_what_mlx_gives():
    """Of frequencies as models have them: both round the same angles."""
    freqs = mx.array((10_000 ** (np.arange(32) / 32)).astype(np.float32))
    case = Case([99_999, 100_000, 1_000_000], norms="", dims=(64, 64), rotated=64)
    case.rope = case.rope._replace(base=None, freqs=freqs)
    q = mx.fast.rope(
        mx.array(case.q)[:, :, None], 64, traditional=False, base=None, scale=1.0, freqs=freqs,
        offset=mx.array(case.positions),
    )[:, :, 0]  # fmt: skip
    np.testing.assert_allclose(case.run()[0], np.array(q), 1e-5, 1e-5)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_against_mlx(dtype, traditional):
    """MLX's norm, and its rotation in float32, for on the CPU it rounds sines to the type."""
    case = Case(FEW, dtype=dtype, traditional=traditional, rotated=24)
    q = mx.fast.rms_norm(mx.array(case.q).astype(dtype), *case.norms["q"])
    q = mx.fast.rope(
        q.astype(mx.float32)[:, :, None], 24, traditional=traditional, base=case.rope.base,
        scale=case.scale, offset=mx.array(case.positions),
    )[:, :, 0]  # fmt: skip
    atol, rtol = TOLERANCE[dtype]
    np.testing.assert_allclose(case.run()[0], np.array(q), rtol, atol)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_a_norm_alone_gives_the_bits_of_mlx(dtype):
    """But for rare elements, since squares are added up in another order."""
    case = Case(FEW, dtype=dtype, rotated=0)
    q = mx.fast.rms_norm(mx.array(case.q).astype(dtype), *case.norms["q"])
    assert (case.run()[0] != np.array(q.astype(mx.float32))).mean() <= 0.01


def test_what_is_not_rotated_may_be_infinite():
    case = Case(FEW, norms="", rotated=16, joined=False)
    case.q[0, 0, 20], case.k[:, 1, 31] = np.inf, -np.inf
    case.columns = case._apart()
    q, keys, _ = case.run()
    assert q[0, 0, 20] == np.inf
    assert np.isfinite(q[0, 0, 21])
    assert np.isneginf(keys[case.slots[case.slots >= 0], 1, 31]).all()


@pytest.mark.parametrize("schedule", ["reverse", 1])
def test_the_order_in_which_threads_run_changes_nothing(schedule):
    expected = Case(FEW).run()
    with installed(schedule=schedule):
        for got, wanted in zip(Case(FEW).run(), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c._replace(start=c.array.shape[1] - 100), "columns .* of an array of"),
        (lambda c: c._replace(start=-1), "q is columns -1 to 127"),
        (lambda c: c._replace(array=c.array.astype(mx.float16)), "of mlx.core.float16, and the st"),
    ],
)
def test_bad_columns_are_named(change, reason):
    case = Case(FEW)
    case.columns[0] = change(case.columns[0])
    with pytest.raises(ValueError, match=reason):
        case.run()


# What it does not serve

SHAPE = AttentionShape(4, 2, 64, 64, mx.float16)


@pytest.mark.parametrize(
    ("shape", "asked", "reason"),
    [
        (SHAPE, None, None),
        (SHAPE, Rope(64, False, 1e4, 1.0, None), None),
        (SHAPE, Rope(20, True, None, 1.0, mx.ones(10)), None),
        (AttentionShape(4, 2, 60, 64, mx.float16), None, "head size 60 is not a multiple of 8"),
        (AttentionShape(4, 2, 64, 64, mx.float16, latent=True), None, "no latent attention"),
        (AttentionShape(4, 2, 64, 64, mx.int32), None, "no kernels for mlx.core.int32"),
        (SHAPE, Rope(66, False, 1e4, 1.0, None), "rotated dims 66 .* up to head size 64"),
        (SHAPE, Rope(7, False, 1e4, 1.0, None), "rotated dims 7"),
        (SHAPE, Rope(64, False, None, 1.0, None), "either a base or freqs"),
        (SHAPE, Rope(64, False, 1e4, 1.0, mx.ones(32)), "either a base or freqs"),
        (SHAPE, Rope(64, False, None, 1.0, mx.ones(31)), r"shape \(31,\), not \(32,\)"),
    ],
)
def test_what_is_not_served(shape, asked, reason):
    found = rope.unsupported(shape, asked)
    assert found == reason if reason is None else re.search(reason, found)
