"""gated_delta on the CPU host, under the checker, as the gated delta rule and as Mamba 2's state
space update: against definitions in float64, mlx-lm's functions and MLX's.

With METAL_LITE_DEVICE=gpu the same cases run on MLX's GPU instead of the host.
"""

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.ssm import ssm_attn

from tests.support.recurrent_cases import (
    DTYPES,
    RAGGED,
    TOLERANCE,
    Segments,
    recurrence_by_definition,
    rounded,
)
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import new_ticket
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.recurrence import given

pytestmark = pytest.mark.usefixtures("host_or_gpu")
WRITTEN = ("states",)
# A gate per head, or per column of the state; the state space update.
FORMS = ("scalar", "vector", "ssm")
LIMITS = (0.001, 100.0)


class Case:
    """Heads (of k, of v) with rows of `dims` (of k, of v); keys have length 1, as in the models."""

    def __init__(
        self, segments, heads=(2, 4), dims=(32, 16), *, form="scalar", dtype=mx.float32, tiles=True
    ):
        rng = np.random.default_rng(segments.seed)
        (k_heads, v_heads), (k_dim, v_dim), rows = heads, dims, segments.num_rows
        self.segments, self.form, self.dtype, self.edge = segments, form, dtype, 0
        self.max_seqlen = segments.max_seqlen if tiles else 1
        q, k = rng.standard_normal((2, rows, k_heads, k_dim))
        norms = np.linalg.norm(k, axis=-1, keepdims=True)
        self.q, self.k = rounded(q * k_dim**-0.5, dtype), rounded(k / norms, dtype)
        self.v = rounded(rng.standard_normal((rows, v_heads, v_dim)), dtype)
        gates = rng.uniform(0.3, 1, (rows, v_heads, k_dim) if form == "vector" else (rows, v_heads))
        self.gates = gates.astype(np.float32)
        self.beta = rounded(rng.uniform(0, 1, (rows, v_heads)), dtype)
        self.skip = None
        if form == "ssm":
            self.skip = rng.standard_normal(v_heads).astype(np.float32)
            self.a_log = np.log(rng.uniform(0.05, 2, v_heads)).astype(np.float32)
            self.time = rounded(rng.standard_normal((rows, v_heads)), dtype)
            self.beta = np.clip(np.logaddexp(self.time, 0), *LIMITS).astype(np.float32)
            self.gates = np.exp(-np.exp(self.a_log) * self.beta)
        self.states = segments.states(v_heads, v_dim, k_dim)

    def inputs(self):
        wide = [mx.array(a).astype(self.dtype) for a in (self.q, self.k, self.v)]
        beta = mx.array(self.beta)
        beta = beta if self.form == "ssm" else beta.astype(self.dtype)
        return [*wide, mx.array(self.gates), beta]

    def run(self):
        """y and the states afterwards."""
        states = mx.array(self.states)
        rows, gates = self.inputs()[:3], self.inputs()[3:]
        columns = [Columns(a.reshape(len(a), -1), 0) for a in rows]
        if self.edge:
            starts = np.cumsum([self.edge, *(c.array.shape[1] for c in columns)])
            edge = mx.zeros((len(rows[0]), self.edge), self.dtype)
            joined = mx.concatenate([edge, *(c.array for c in columns), edge], axis=1)
            columns = [Columns(joined[:, None], int(start)) for start in starts[:3]]
        segments, skip = mx.array(self.segments.array), self.skip
        how = {"num_k_heads": self.k.shape[1], "max_seqlen": self.max_seqlen}
        how["skip"] = None if skip is None else mx.array(skip)
        y, ticket = gated_delta(*columns, given(*gates), states, segments, new_ticket(), **how)
        mx.eval(y, ticket)
        assert y.dtype == self.dtype
        return [np.array(a.astype(mx.float32)) for a in (y, states)]

    def expected(self):
        rows = self.q, self.k, self.v, self.gates, self.beta
        delta = self.form != "ssm"
        y, states = recurrence_by_definition(self.segments, self.states, *rows, delta=delta)
        return (y if self.skip is None else y + self.skip[:, None] * self.v[: len(y)]), states

    def check(self):
        y, states = self.run()
        expected, after = self.expected()
        rows = len(expected)
        np.testing.assert_allclose(y[:rows], expected, *TOLERANCE[self.dtype])
        assert not y[rows:].any()
        np.testing.assert_allclose(states, after, *TOLERANCE[mx.float32])
        return y

    def rows(self, begin, end, segments):
        """The same rows from begin to end, as another case."""
        part = Case(segments, form=self.form)
        part.skip = self.skip
        for name in ("q", "k", "v", "gates", "beta"):
            setattr(part, name, getattr(self, name)[begin:end])
        return part


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiles", [False, True], ids=["rows", "tiles"])
def test_ragged_segments(tiles, form, dtype):
    Case(Segments(**RAGGED), form=form, dtype=dtype, tiles=tiles).check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("heads", "dims"),
    [((1, 1), (128, 128)), ((2, 2), (128, 8)), ((1, 3), (16, 72)), ((2, 4), (48, 24)),
     ((1, 1), (256, 64)), ((3, 6), (48, 8)), ((2, 2), (16, 80))],
)  # fmt: skip
def test_heads_and_head_sizes(heads, dims, form):
    segments = Segments([9, 1], fresh={0}, padding=1)
    Case(segments, heads, dims, form=form).check()


@pytest.mark.parametrize("tiles", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize("edge", [8, 7])
def test_columns_of_one_array(edge, tiles):
    """Heads that begin at a multiple of four elements, and others."""
    case = Case(Segments(**RAGGED), tiles=tiles, dtype=mx.bfloat16)
    case.edge = edge
    case.check()


def test_one_row_of_few_heads():
    """Fewer gates than an array in device memory has."""
    Case(Segments([1]), (1, 2), (16, 8)).check()


@drawn(
    st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from(FORMS),
    st.integers(0, 99),
)
@settings(max_examples=30)
def test_random_segments(parts, padding, form, seed):
    lengths, fresh, moved = zip(*parts, strict=True)
    chosen = [{s for s, is_so in enumerate(of) if is_so} for of in (fresh, moved)]
    half = [(s, n // 2) for s, n in enumerate(lengths)]
    segments = Segments([*lengths], chosen[0], padding, half, chosen[1], seed)
    Case(segments, (1, 2), (16, 8), form=form).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["scalar", "vector"])
def test_the_same_as_mlx_lm_s_operations(form, dtype):
    case = Case(Segments([19]), form=form, dtype=dtype)
    slot = int(case.segments.final[0])
    batch = [a[None] for a in case.inputs()]
    theirs, state = gated_delta_ops(*batch, mx.array(case.states[slot])[None])
    y, states = case.run()
    rtol, atol = TOLERANCE[dtype]  # two roundings of a result may lie a step apart
    np.testing.assert_allclose(y, np.array(theirs[0].astype(mx.float32)), 2 * rtol, 2 * atol)
    np.testing.assert_allclose(states[slot], np.array(state[0]), *TOLERANCE[mx.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_as_mlx_lm_s_state_space_update(dtype):
    case = Case(Segments([19]), form="ssm", dtype=dtype)
    slot = int(case.segments.final[0])
    c, b, x = (a[None] for a in case.inputs()[:3])
    a_log, skip, time = mx.array(case.a_log), mx.array(case.skip), mx.array(case.time)
    before = mx.array(case.states[slot])[None]
    rows = x, a_log, b, c, skip, time.astype(dtype)[None]
    theirs, state = ssm_attn(*rows, mx.zeros(4), before, LIMITS, step=8)
    y, states = case.run()
    rtol, atol = TOLERANCE[dtype]
    # mlx-lm rounds the recurrence's part before it adds skip * x.
    room = 2 * rtol * np.abs(case.skip[:, None] * case.v).max()
    theirs = np.array(theirs[0].astype(mx.float32))
    np.testing.assert_allclose(y, theirs, 2 * rtol, 4 * atol + room)
    rtol, atol = TOLERANCE[mx.float32]
    np.testing.assert_allclose(states[slot], np.array(state[0]), rtol, 2 * atol)


def test_the_same_as_mlx_s_chunked_form():
    case = Case(Segments([19], fresh={0}))
    theirs, state = mx.fast.gated_delta_update(*(a[None] for a in case.inputs()))
    y, states = case.run()
    rtol, atol = TOLERANCE[mx.float32]
    np.testing.assert_allclose(y, np.array(theirs[0]), rtol, 4 * atol)  # it takes logarithms
    np.testing.assert_allclose(states[case.segments.final[0]], np.array(state[0]), rtol, 4 * atol)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [1, 8, 13, 19, 20])
def test_a_prompt_in_two_chunks_is_the_whole_prompt(cut, form):
    """Bit for bit, wherever it is cut."""
    whole = Case(Segments([21], fresh={0}), form=form)
    y, states = whole.run()
    head = whole.rows(0, cut, Segments([cut], fresh={0}))
    first, head_states = head.run()
    tail = whole.rows(cut, 21, Segments([21 - cut]))
    tail.states[tail.segments.initial[0]] = head_states[head.segments.final[0]]
    second, tail_states = tail.run()
    np.testing.assert_array_equal(np.concatenate([first, second]), y)
    np.testing.assert_array_equal(
        tail_states[tail.segments.final[0]], states[whole.segments.final[0]]
    )


@pytest.mark.skipif(not backend.is_cpu(), reason="compilers may join a product and a sum")
@pytest.mark.parametrize("form", FORMS)
def test_tiles_give_the_bits_of_rows_alone(form):
    """So tokens that are decoded leave the state of a prompt with these tokens."""
    segments = Segments(**RAGGED)
    tiles, alone = (Case(segments, form=form, tiles=is_so) for is_so in (True, False))
    for got, wanted in zip(tiles.run(), alone.run(), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_checkpoint_changes_nothing():
    plain, kept = (
        Case(Segments([21], fresh={0}, checkpoints=rows))
        for rows in ([], [(0, 3), (0, 8), (0, 20)])
    )
    results = [plain.run(), kept.run()]
    np.testing.assert_array_equal(results[0][0], results[1][0])


def test_a_prompt_goes_on_from_a_checkpoint_as_if_it_had_never_stopped():
    whole = Case(Segments([21], fresh={0}, checkpoints=[(0, 13)]))
    y, states = whole.run()
    tail = whole.rows(13, 21, Segments([8], moved={0}))
    tail.states[tail.segments.initial[0]] = states[whole.segments.taken[0][2]]
    rest, after = tail.run()
    np.testing.assert_array_equal(rest, y[13:])
    np.testing.assert_array_equal(after[tail.segments.final[0]], states[whole.segments.final[0]])


def test_gates_of_zero_forget_everything():
    """Equal keys, which a beta of 2 reflects, give the largest terms."""
    case = Case(Segments([24], fresh=set()), form="vector")
    case.gates[:] = 1
    case.gates[5, 1] = 0
    case.gates[9:12, :, ::2] = 0
    case.gates[17] = 1e-30
    case.k[:] = case.k[:1]
    case.beta[:] = 2
    case.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": Columns(mx.zeros((3, 32)), 0)}, "q of 2 rows, k of 3, both of 2 heads, and v of 2"),
        ({"num_k_heads": 3}, "both of 3 heads, and v of 2 rows of 4 heads do not fit together"),
        ({"q": Columns(mx.zeros((2, 32), mx.float16), 0)}, r"array is \(2, 32\) mlx.core.float16"),
        ({"k": Columns(mx.zeros((2, 32)), 8)}, r"k is columns 8 to 40 of .* \(2, 32\)"),
        (
            {"gates": lambda: given(mx.zeros((2, 2)), mx.zeros((2, 4)))},
            r"gates \(2, 2\) .* not \(2, 4\)",
        ),
        (
            {"gates": lambda: given(mx.zeros((2, 4), mx.float16), mx.zeros((2, 4)))},
            "float16 are not",
        ),
        (
            {"gates": lambda: given(mx.zeros((1, 4)), mx.zeros((1, 4)))},
            "of 1 rows are not of 2 rows",
        ),
        ({"skip": mx.zeros(3)}, r"skip \(3,\) is not \(4,\)"),
        (
            {"states": mx.zeros((3, 4, 8, 16), mx.float16)},
            r"not \(slots, 4, 8, 16\) mlx.core.float3",
        ),
        ({"states": mx.zeros((3, 4, 8, 272))}, "key size 272 is not a multiple of 16 up to 256"),
        ({"states": mx.zeros((3, 4, 8, 24))}, "key size 24 is not"),
        ({"v": Columns(mx.zeros((2, 32), mx.int32), 0)}, "no kernels for mlx.core.int32"),
        ({"states": mx.zeros((3, 4, 12, 16))}, "head size 12 is not a multiple of 8"),
    ],
)
def test_bad_input_is_named(change, message):
    arrays = {"q": Columns(mx.zeros((2, 32)), 0), "k": Columns(mx.zeros((2, 32)), 0)}
    arrays |= {"v": Columns(mx.zeros((2, 32)), 0), "num_k_heads": 2}
    arrays |= {"gates": lambda: given(mx.zeros((2, 4)), mx.zeros((2, 4)))}
    arrays |= {"states": mx.zeros((3, 4, 8, 16)), "segments": mx.array(Segments([2]).array)}
    arrays |= {"ticket": new_ticket()}
    arrays |= change
    make = arrays.pop("gates")
    with pytest.raises(ValueError, match=message):
        gated_delta(**arrays, gates=make(), max_seqlen=2)
