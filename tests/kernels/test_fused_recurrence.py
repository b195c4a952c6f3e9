"""gated_delta with what a layer's projections give: logits of gates, and q and k before their norm.

Against definitions in float64, and mlx-lm's functions.  With METAL_LITE_DEVICE=gpu the same cases
run on MLX's GPU instead of the host.
"""

import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from mlx_lm.models.ssm import ssm_update

from tests.support.recurrent_cases import (
    RAGGED,
    TOLERANCE,
    Segments,
    recurrence_by_definition,
    rounded,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import new_ticket
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.recurrence import GatedNorm, column_gates, delta_gates, time_gates

pytestmark = pytest.mark.usefixtures("host_or_gpu")
WRITTEN = ("states",)

K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 48, 24
NORM, LIMITS = GatedNorm(1e-6, K_DIM**-0.5), (0.1, 1.5)
KINDS = {
    "softplus": {}, "columns": {}, "bounded": {"lower_bound": -5.0}, "negative": {"beta_scale": 2},
    "time": None,
}  # fmt: skip
# Gates are exponentials of float32 exponents of some units.
GATES = (2e-5, 1e-5)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Case:
    """A layer's projections in one array: q, k, v, and the logits of beta and of the gate."""

    def __init__(self, segments, kind="softplus", dtype=mx.float32):
        rng = np.random.default_rng(segments.seed)
        self.segments, self.kind, self.dtype = segments, kind, dtype
        self.norm = None if kind == "time" else NORM
        rows = segments.num_rows
        draw = rng.standard_normal
        self.q, self.k = rounded(draw((2, rows, K_HEADS, K_DIM)) / (1 if self.norm else 7), dtype)
        self.v = rounded(draw((rows, V_HEADS, V_DIM)), dtype)
        self.of_columns = rng.uniform(0.3, 1, (rows, V_HEADS, K_DIM)).astype(np.float32)
        self.a, self.b = rounded(draw((2, rows, V_HEADS)) * 2, dtype)
        self.a_log = np.log(rng.uniform(0.1, 3, V_HEADS)).astype(np.float32)
        self.bias, self.skip = rounded(draw((2, V_HEADS)), dtype)
        self.states = segments.states(V_HEADS, V_DIM, K_DIM)

    def columns(self):
        parts = [a.reshape(len(a), -1) for a in (self.q, self.k, self.v, self.a, self.b)]
        starts = np.cumsum([8, *(part.shape[1] for part in parts)]).tolist()
        edge = np.zeros((len(self.q), 8), np.float32)
        joined = mx.array(np.concatenate([edge, *parts], axis=1)).astype(self.dtype)
        return [Columns(joined, start) for start in starts[:5]]

    def run(self, max_seqlen=None):
        q, k, v, a, b = self.columns()
        a_log, bias = mx.array(self.a_log), mx.array(self.bias).astype(self.dtype)
        states, segments = mx.array(self.states), mx.array(self.segments.array)
        longest = self.segments.max_seqlen if max_seqlen is None else max_seqlen
        skip = None
        if self.kind == "time":
            gates, skip = time_gates(a, a_log, bias, LIMITS), mx.array(self.skip)
        elif self.kind == "columns":
            gates = column_gates(mx.array(self.of_columns), b)
        else:
            gates = delta_gates(a, b, a_log, bias, **KINDS[self.kind])
        how = {"max_seqlen": longest, "norm": self.norm, "skip": skip}
        y, ticket = gated_delta(
            q, k, v, gates, states, segments, new_ticket(), num_k_heads=K_HEADS, **how
        )
        mx.eval(y, ticket)
        return [np.array(array.astype(mx.float32)) for array in (y, states)]

    def gates(self):
        """The gate and beta, in float64."""
        a, rate = (self.a.astype(np.float64) + self.bias), np.exp(self.a_log.astype(np.float64))
        if self.kind == "columns":
            return self.of_columns, sigmoid(self.b.astype(np.float64))
        if self.kind == "bounded":
            return np.exp(-5 * sigmoid(rate * a)), sigmoid(self.b.astype(np.float64))
        time = np.logaddexp(a, 0)
        if self.kind == "time":
            time = np.clip(time, *LIMITS)
            return np.exp(-rate * time), time
        scale = KINDS[self.kind].get("beta_scale", 1)
        return np.exp(-rate * time), scale * sigmoid(self.b.astype(np.float64))

    def expected(self):
        q, k = self.q.astype(np.float64), self.k.astype(np.float64)
        if self.norm:
            q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + NORM.eps) for x in (q, k))
            q = q * NORM.q_scale
        gate, beta = self.gates()
        y, states = recurrence_by_definition(
            self.segments, self.states, q, k, self.v, gate, beta, delta=self.kind != "time"
        )
        return y + (self.skip[:, None] * self.v[: len(y)] if self.kind == "time" else 0), states


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tiles", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize("kind", KINDS)
def test_gates_of_every_kind(kind, tiles, dtype):
    case = Case(Segments(**RAGGED), kind, dtype)
    y, states = case.run(None if tiles else 1)
    expected, after = case.expected()
    rtol, atol = TOLERANCE[dtype]
    np.testing.assert_allclose(y[: len(expected)], expected, rtol + GATES[0], atol + GATES[1])
    assert not y[len(expected) :].any()
    np.testing.assert_allclose(states, after, *GATES)


@pytest.mark.parametrize("kind", ["softplus", "bounded", "time"])
@pytest.mark.parametrize("max_seqlen", [None, 1], ids=["tiles", "rows"])
def test_nan_of_a_gate_stays_in_its_head(max_seqlen, kind):
    """A limit must not turn it into a number, which would hide a broken model."""
    case = Case(Segments([9, 1], fresh={0}), kind)
    case.a[3, 1] = np.nan
    with np.errstate(invalid="ignore"):
        expected = case.expected()
    for got, wanted in zip(case.run(max_seqlen), expected, strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))


def test_logits_that_are_large():
    """Gates of 0 and of 1, and a beta of 0."""
    case = Case(Segments([9, 1], fresh={0}))
    case.a[::2], case.a[1::2] = 60, -60
    case.b[3] = -90
    y, states = case.run()
    expected, after = case.expected()
    np.testing.assert_allclose(y, expected, *GATES)
    np.testing.assert_allclose(states, after, *GATES)


def test_rows_of_zeros_have_a_norm():
    case = Case(Segments([9]))
    case.q[:], case.k[3] = 0, 0
    y, states = case.run()
    assert not y.any()
    np.testing.assert_allclose(states, case.expected()[1], *GATES)


def test_one_row_of_few_heads():
    """Fewer logits than an array in device memory has."""
    case = Case(Segments([1]))
    whole = case.run()
    case.columns = lambda: [
        Columns(mx.array(x.reshape(1, -1)), 0) for x in (case.q, case.k, case.v, case.a, case.b)
    ]
    for got, wanted in zip(case.run(), whole, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "columns"])
def test_the_same_as_mlx_lm_s_functions(kind):
    case = Case(Segments([19]), kind)
    slot = int(case.segments.final[0])
    names = ("q", "k", "v", "a", "b", "a_log", "bias", "skip")
    q, k, v, a, b, a_log, bias, skip = (mx.array(getattr(case, name)) for name in names)
    q, k, v, a, b = (x[None] for x in (q, k, v, a, b))
    state = mx.array(case.states[slot])[None]
    if kind == "time":
        theirs, state = ssm_update(v, a_log, k, q, skip, a, bias, state, LIMITS)
    else:
        q, k = normalize_qk(q, k, inv_scale=NORM.q_scale, eps=NORM.eps)
        how = {k: v for k, v in KINDS[kind].items() if k == "lower_bound"}
        negative = "beta_scale" in KINDS[kind]
        theirs, state = gated_delta_update(
            q, k, v, a, b, a_log, bias, state, allow_neg_eigval=negative, **how
        )
    y, states = case.run()
    np.testing.assert_allclose(y, np.array(theirs[0]), *GATES)
    np.testing.assert_allclose(states[slot], np.array(state[0]), *GATES)


@pytest.mark.parametrize("kind", ["softplus", "time"])
def test_a_prompt_in_two_chunks_is_the_whole_prompt(kind):
    """Bit for bit, wherever it is cut."""
    whole = Case(Segments([21], fresh={0}), kind)
    y, states = whole.run()
    results, state = [], None
    for begin, end in ((0, 13), (13, 14), (14, 21)):
        part = Case(Segments([end - begin], fresh=set() if begin else {0}), kind)
        for name in ("q", "k", "v", "a", "b"):
            setattr(part, name, getattr(whole, name)[begin:end])
        part.a_log, part.bias, part.skip = whole.a_log, whole.bias, whole.skip
        if begin:
            part.states[part.segments.initial[0]] = state
        result, after = part.run()
        results.append(result)
        state = after[part.segments.final[0]]
    np.testing.assert_array_equal(np.concatenate(results), y)
    np.testing.assert_array_equal(state, states[whole.segments.final[0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": Columns(mx.zeros((2, 4)), 2)}, r"g is columns 2 to 6 of .* \(2, 4\)"),
        ({"b": Columns(mx.zeros((3, 4)), 0)}, "beta of 3 rows are not of 2 rows"),
        ({"a_log": mx.zeros(3)}, r"a_log \(3,\) is not \(4,\)"),
        ({"dt_bias": mx.zeros((4, 16))}, r"bias \(4, 16\) is not \(4,\)"),
    ],
)
def test_bad_input_is_named(change, message):
    arrays = {"a": Columns(mx.zeros((2, 4)), 0), "b": Columns(mx.zeros((2, 4)), 0)}
    arrays |= {"a_log": mx.zeros(4), "dt_bias": mx.zeros(4)}
    rows = Columns(mx.zeros((2, 32)), 0)
    inputs = mx.zeros((3, 4, 8, 16)), mx.array(Segments([2]).array), new_ticket()
    how = {"num_k_heads": 2, "max_seqlen": 2, "norm": NORM}
    with pytest.raises(ValueError, match=message):
        gated_delta(rows, rows, rows, delta_gates(**(arrays | change)), *inputs, **how)
