"""gated_delta on the CPU host, under the checker, as the gated delta rule and as Mamba 2's state
space update: of gates that are given, and of a layer's logits with q and k before their norm.

Against definitions in float64, mlx-lm's functions and MLX's.
"""

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import gated_delta_ops, gated_delta_update, normalize_qk
from mlx_lm.models.ssm import ssm_attn, ssm_update

from tests.support.kernels.recurrent_cases import (
    DTYPES,
    RAGGED,
    TOLERANCE,
    Segments,
    given,
    recurrence_by_definition,
    rounded,
)
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.recurrence import QKNorm, column_gates, delta_gates, time_gates
from vllm_metal_lite.kernels.store import new_ticket

pytestmark = pytest.mark.usefixtures("host_or_gpu")
WRITTEN = ("states",)
# The forms with given gates: one gate per head, one per column of the state, and the state space
# update.
GIVEN = ("scalar", "vector", "ssm")
# The forms of layers: gates from logits, gates given per column, and the state space update.
FUSED = {
    "softplus": {},
    "columns": {},
    "bounded": {"lower_bound": -5.0},
    "negative": {"beta_scale": 2},
    "time": None,
}
KINDS = (*GIVEN, *FUSED)
FUSED_SIZES = {"dims": (48, 24)}
LIMITS = (0.1, 1.5)
# The tolerance of gates, which are exponentials of float32 numbers of a few units.
GATES = (2e-5, 1e-5)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Case:
    """Heads (of k, of v) with rows of `dims` (of k, of v).

    edge: columns before the rows, which then are in one array; None: each is an array.
    """

    def __init__(
        self, segments, kind="scalar", heads=(2, 4), dims=(32, 16), dtype=mx.float32, tiles=True
    ):
        rng = np.random.default_rng(segments.seed)
        (k_heads, v_heads), (k_dim, v_dim), rows = heads, dims, segments.num_rows
        self.segments, self.kind, self.dtype, self.dims = segments, kind, dtype, dims
        self.max_seqlen = segments.max_seqlen if tiles else 1
        self.edge = 8 if kind in FUSED else None
        self.delta, self.norm = kind not in ("ssm", "time"), None
        q, k = rng.standard_normal((2, rows, k_heads, k_dim))
        if kind in FUSED and self.delta:
            self.norm = QKNorm(k_dim**-0.5, 1e-6)
        else:  # keys have length 1, like those of models
            q, k = q * k_dim**-0.5, k / np.linalg.norm(k, axis=-1, keepdims=True)
        self.q, self.k = rounded(q, dtype), rounded(k, dtype)
        self.v = rounded(rng.standard_normal((rows, v_heads, v_dim)), dtype)
        columns = (k_dim,) if kind in ("vector", "columns") else ()
        self.gates = rng.uniform(0.3, 1, (rows, v_heads, *columns)).astype(np.float32)
        self.beta = rounded(rng.uniform(0, 1, (rows, v_heads)), dtype)
        self.a, self.b = rounded(2 * rng.standard_normal((2, rows, v_heads)), dtype)
        self.a_log = np.log(rng.uniform(0.1, 3, v_heads)).astype(np.float32)
        self.bias, self.skip = rounded(rng.standard_normal((2, v_heads)), dtype)
        if kind == "ssm":
            self.beta = np.clip(np.logaddexp(self.a, 0), *LIMITS).astype(np.float32)
            self.gates = np.exp(-np.exp(self.a_log) * self.beta)
        self.states = segments.states(v_heads, v_dim, k_dim)

    def columns(self):
        parts = [a.reshape(len(a), -1) for a in (self.q, self.k, self.v, self.a, self.b)]
        if self.edge is None:
            return [Columns(mx.array(part).astype(self.dtype), 0) for part in parts]
        starts = np.cumsum([self.edge, *(part.shape[1] for part in parts)]).tolist()
        edge = np.zeros((len(self.q), self.edge), np.float32)
        joined = mx.array(np.concatenate([edge, *parts, edge], axis=1)).astype(self.dtype)
        return [Columns(joined[:, None], start) for start in starts[:5]]

    def inputs(self):
        """Random rows, gates and beta."""
        rows = [mx.array(a).astype(self.dtype) for a in (self.q, self.k, self.v)]
        beta = mx.array(self.beta)
        beta = beta if self.kind == "ssm" else beta.astype(self.dtype)
        return [*rows, mx.array(self.gates), beta]

    def gates_of(self, a, b):
        a_log, bias = mx.array(self.a_log), mx.array(self.bias).astype(self.dtype)
        if self.kind in GIVEN:
            return given(*self.inputs()[3:])
        if self.kind == "time":
            return time_gates(a, a_log, bias, LIMITS)
        if self.kind == "columns":
            return column_gates(mx.array(self.gates), b)
        return delta_gates(a, b, a_log, bias, **FUSED[self.kind])

    def run(self):
        """The kernel's y, and the states after the launch."""
        *rows, a, b = self.columns()
        arrays = mx.array(self.states), mx.array(self.segments.array), new_ticket()
        how = {"num_k_heads": self.k.shape[1], "max_seqlen": self.max_seqlen, "norm": self.norm}
        how |= {"skip": None if self.delta else mx.array(self.skip)}
        y, ticket = gated_delta(*rows, self.gates_of(a, b), *arrays, **how)
        mx.eval(y, ticket)
        assert y.dtype == self.dtype
        return [np.array(array.astype(mx.float32)) for array in (y, arrays[0])]

    def exact_gates(self):
        """The gate and beta, in float64."""
        a, b = self.a.astype(np.float64) + self.bias, sigmoid(self.b.astype(np.float64))
        rate, time = np.exp(self.a_log.astype(np.float64)), np.logaddexp(a, 0)
        if self.kind in GIVEN:
            return self.gates, self.beta
        if self.kind == "columns":
            return self.gates, b
        if self.kind == "bounded":
            return np.exp(-5 * sigmoid(rate * a)), b
        if self.kind == "time":
            time = np.clip(time, *LIMITS)
            return np.exp(-rate * time), time
        return np.exp(-rate * time), FUSED[self.kind].get("beta_scale", 1) * b

    def expected(self):
        q, k = self.q.astype(np.float64), self.k.astype(np.float64)
        if self.norm:
            q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + self.norm.eps) for x in (q, k))
            q = q * self.norm.inv_scale
        rows = q, k, self.v, *self.exact_gates()
        y, states = recurrence_by_definition(self.segments, self.states, *rows, delta=self.delta)
        return (y if self.delta else y + self.skip[:, None] * self.v[: len(y)]), states

    def check(self):
        y, states = self.run()
        expected, after = self.expected()
        (rtol, atol), of_state = TOLERANCE[self.dtype], TOLERANCE[mx.float32]
        if self.kind in FUSED:
            rtol, atol, of_state = rtol + GATES[0], atol + GATES[1], GATES
        np.testing.assert_allclose(y[: len(expected)], expected, rtol, atol)
        assert not y[len(expected) :].any()
        np.testing.assert_allclose(states, after, *of_state)

    def rows(self, begin, end, segments):
        """A case of the rows from begin to end."""
        part = Case(segments, self.kind, dims=self.dims)
        part.a_log, part.bias, part.skip = self.a_log, self.bias, self.skip
        for name in ("q", "k", "v", "gates", "beta", "a", "b"):
            setattr(part, name, getattr(self, name)[begin:end])
        return part


def case_of(kind, segments, **how):
    """A case of this form, at the sizes of the tests."""
    return Case(segments, kind, **(FUSED_SIZES if kind in FUSED else {}), **how)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiles", [False, True], ids=["rows", "tiles"])
def test_ragged_segments(tiles, kind, dtype):
    case_of(kind, Segments(**RAGGED), dtype=dtype, tiles=tiles).check()


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize(
    ("heads", "dims"),
    [((1, 1), (128, 128)), ((2, 2), (128, 8)), ((1, 3), (16, 72)), ((2, 4), (48, 24)),
     ((1, 1), (256, 64)), ((3, 6), (48, 8)), ((2, 2), (16, 80))],
)  # fmt: skip
def test_heads_and_head_sizes(heads, dims, kind):
    segments = Segments([9, 1], fresh={0}, padding=1)
    Case(segments, kind, heads, dims).check()


@pytest.mark.parametrize("tiles", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize("edge", [8, 7])
def test_columns_of_one_array(edge, tiles):
    """Heads begin at a multiple of four elements, or not."""
    case = Case(Segments(**RAGGED), tiles=tiles, dtype=mx.bfloat16)
    case.edge = edge
    case.check()


def test_one_row_of_few_heads():
    """MLX passes fewer than MIN_ELEMENTS gates in the constant address space."""
    Case(Segments([1]), "scalar", (1, 2), (16, 8)).check()


@drawn(
    st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from(GIVEN),
    st.integers(0, 99),
)
@settings(max_examples=30)
def test_random_segments(parts, padding, kind, seed):
    Case(Segments.drawn(parts, padding, seed), kind, (1, 2), (16, 8)).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_the_same_as_mlx_lm_s_operations(kind, dtype):
    case = Case(Segments([19]), kind=kind, dtype=dtype)
    slot = int(case.segments.final[0])
    batch = [a[None] for a in case.inputs()]
    theirs, state = gated_delta_ops(*batch, mx.array(case.states[slot])[None])
    y, states = case.run()
    rtol, atol = TOLERANCE[dtype]  # two results that were rounded may differ by a step
    np.testing.assert_allclose(y, np.array(theirs[0].astype(mx.float32)), 2 * rtol, 2 * atol)
    np.testing.assert_allclose(states[slot], np.array(state[0]), *TOLERANCE[mx.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_as_mlx_lm_s_state_space_update(dtype):
    case = Case(Segments([19]), kind="ssm", dtype=dtype)
    slot = int(case.segments.final[0])
    c, b, x = (a[None] for a in case.inputs()[:3])
    a_log, skip, time = mx.array(case.a_log), mx.array(case.skip), mx.array(case.a)
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
    # mlx-lm takes logarithms of gates.
    np.testing.assert_allclose(y, np.array(theirs[0]), rtol, 4 * atol)
    np.testing.assert_allclose(states[case.segments.final[0]], np.array(state[0]), rtol, 4 * atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 8, 13, 19, 20])
def test_a_prompt_in_chunks_is_the_whole_prompt(cut, kind):
    """The bits are equal for every cut, also with one row alone."""
    whole = case_of(kind, Segments([21], fresh={0}))
    y, states = whole.run()
    results, state = [], None
    for begin, end in ((0, cut), (cut, cut + 1), (cut + 1, 21)):
        if begin < end:
            part = whole.rows(begin, end, Segments([end - begin], fresh=set() if begin else {0}))
            if begin:
                part.states[part.segments.initial[0]] = state
            result, after = part.run()
            results.append(result)
            state = after[part.segments.final[0]]
    np.testing.assert_array_equal(np.concatenate(results), y)
    np.testing.assert_array_equal(state, states[whole.segments.final[0]])


@pytest.mark.skipif(not backend.is_cpu(), reason="compilers may join a product and a sum")
@pytest.mark.parametrize("kind", GIVEN)
def test_tiles_give_the_bits_of_rows_alone(kind):
    """So decoded tokens leave the same state as a prompt of these tokens."""
    segments = Segments(**RAGGED)
    tiles, alone = (Case(segments, kind=kind, tiles=is_so) for is_so in (True, False))
    for got, wanted in zip(tiles.run(), alone.run(), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.skipif(not backend.is_cpu(), reason="compilers may join a product and a sum")
@pytest.mark.parametrize("kind", [*GIVEN, "softplus"])
def test_drafts_leave_the_bits_of_rows_one_by_one(kind):
    """With a state before each draft, in tiles that begin anew at each."""
    lengths, alone = [2, 9, 40], {}
    cases = [case_of(kind, Segments.drafted(lengths, count)) for count in range(1, 9)]
    starts = [cases[0].states[slot] for slot in cases[0].segments.initial]
    rows, ends = [], np.cumsum([0, *lengths]).tolist()
    for s, state in enumerate(starts):
        for row in range(ends[s], ends[s + 1]):
            part = cases[0].rows(row, row + 1, Segments([1]))
            part.states[part.segments.initial[0]] = state
            y, after = part.run()
            rows.append(y[0])
            state = alone[row + 1] = after[part.segments.final[0]]
    for case in cases:
        case.states[case.segments.initial] = starts
        y, states = case.run()
        np.testing.assert_array_equal(y, rows)
        for row, slot in case.segments.left():
            np.testing.assert_array_equal(states[slot], alone[row])


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
    """All keys are equal and beta is 2, which gives the largest terms."""
    case = Case(Segments([24], fresh=set()), kind="vector")
    case.gates[:] = 1
    case.gates[5, 1] = 0
    case.gates[9:12, :, ::2] = 0
    case.gates[17] = 1e-30
    case.k[:] = case.k[:1]
    case.beta[:] = 2
    case.check()


# Logits


@pytest.mark.parametrize("kind", ["softplus", "bounded", "time"])
@pytest.mark.parametrize("tiles", [False, True], ids=["rows", "tiles"])
def test_nan_of_a_gate_stays_in_its_head(tiles, kind):
    """A limit does not turn NaN into a number, which would hide a broken model."""
    case = case_of(kind, Segments([9, 1], fresh={0}), tiles=tiles)
    case.a[3, 1] = np.nan
    with np.errstate(invalid="ignore"):
        expected = case.expected()
    for got, wanted in zip(case.run(), expected, strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))


def test_logits_that_are_large():
    """Logits so large that gates are 0 and 1, and beta is 0."""
    case = case_of("softplus", Segments([9, 1], fresh={0}))
    case.a[::2], case.a[1::2] = 60, -60
    case.b[3] = -90
    case.check()


def test_rows_of_zeros_have_a_norm():
    case = case_of("softplus", Segments([9]))
    case.q[:], case.k[3] = 0, 0
    y, states = case.run()
    assert not y.any()
    np.testing.assert_allclose(states, case.expected()[1], *GATES)


def test_limits_of_a_time_are_finite_and_not_negative():
    """The limits are template values of the kernel."""
    a = Columns(mx.zeros((2, 4)), 0)
    gates = time_gates(a, mx.zeros(4), mx.zeros(4), (-np.inf, np.inf))
    assert (gates.low, gates.high) == (0, 3e38)


def test_logits_of_one_row():
    """MLX passes fewer than MIN_ELEMENTS logits in the constant address space."""
    case = case_of("softplus", Segments([1]))
    whole = case.run()
    case.edge = None
    for got, wanted in zip(case.run(), whole, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", [kind for kind in FUSED if kind != "columns"])
def test_logits_give_the_same_as_mlx_lm_s_functions(kind):
    case = case_of(kind, Segments([19]))
    slot = int(case.segments.final[0])
    names = ("q", "k", "v", "a", "b", "a_log", "bias", "skip")
    q, k, v, a, b, a_log, bias, skip = (mx.array(getattr(case, name)) for name in names)
    q, k, v, a, b = (x[None] for x in (q, k, v, a, b))
    state = mx.array(case.states[slot])[None]
    if kind == "time":
        theirs, state = ssm_update(v, a_log, k, q, skip, a, bias, state, LIMITS)
    else:
        q, k = normalize_qk(q, k, inv_scale=case.norm.inv_scale, eps=case.norm.eps)
        how = {k: v for k, v in FUSED[kind].items() if k == "lower_bound"}
        negative = "beta_scale" in FUSED[kind]
        theirs, state = gated_delta_update(
            q, k, v, a, b, a_log, bias, state, allow_neg_eigval=negative, **how
        )
    y, states = case.run()
    np.testing.assert_allclose(y, np.array(theirs[0]), *GATES)
    np.testing.assert_allclose(states[slot], np.array(state[0]), *GATES)


# What is refused


def logits(**change):
    arrays = {"a": Columns(mx.zeros((2, 4)), 0), "b": Columns(mx.zeros((2, 4)), 0)}
    return delta_gates(**{**arrays, "a_log": mx.zeros(4), "dt_bias": mx.zeros(4), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": Columns(mx.zeros((3, 32)), 0)}, r"k is columns 0 to 32 of 2 rows .* \(3, 32\)"),
        ({"q": Columns(mx.zeros((2, 32), mx.float16), 0)}, r"array is \(2, 32\) mlx.core.float16"),
        ({"k": Columns(mx.zeros((2, 32)), 8)}, r"k is columns 8 to 40 of .* \(2, 32\)"),
        ({"gates": given(*mx.zeros((2, 1, 4)))}, r"g is columns 0 to 4 of 2 rows .* \(1, 4\)"),
        ({"skip": mx.zeros(3)}, r"skip must be \(4,\), not \(3,\)"),
        (
            {"states": mx.zeros((3, 4, 8, 16), mx.float16)},
            r"states must be \(3, 4, 8, 16\) mlx.core.float32, not",
        ),
        ({"gates": logits(a=Columns(mx.zeros((2, 4)), 2))}, r"g is columns 2 to 6 of .* \(2, 4\)"),
        (
            {"gates": logits(b=Columns(mx.zeros((3, 4)), 0))},
            r"b is columns 0 to 4 of 2 .* \(3, 4\)",
        ),
        ({"gates": logits(a_log=mx.zeros(3))}, r"a_log must be \(4,\), not \(3,\)"),
        ({"gates": logits(dt_bias=mx.zeros((4, 16)))}, r"bias must be \(4,\), not \(4, 16\)"),
        ({"gates": logits(lower_bound=0.5)}, "template value must be at least 0, not -0.5"),
    ],
)
def test_bad_input_is_named(change, message):
    arrays = dict.fromkeys("qkv", Columns(mx.zeros((2, 32)), 0))
    arrays |= {"gates": given(*mx.zeros((2, 2, 4))), "states": mx.zeros((3, 4, 8, 16))}
    arrays |= {"segments": mx.array(Segments([2]).array), "ticket": new_ticket(), **change}
    with pytest.raises(ValueError, match=message):
        gated_delta(**arrays, num_k_heads=2, max_seqlen=2)
