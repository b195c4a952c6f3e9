"""A small launch of every kernel of recurrent layers, which uses all of its parts."""

from functools import partial

from tests.support.kernels.arrays import seeded
from tests.support.kernels.recurrent_cases import RAGGED, Segments, given
from tests.support.kernels.row import RECURRENT, KernelTest, ServingCase
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.kernels.recurrence import QKNorm, delta_gates, time_gates
from vllm_metal_lite.kernels.store import new_ticket


def causal_conv_rows(dtype):
    """Segments of every kind, and channels for two threadgroups.  Slots where no segment starts are
    NaN."""
    step = Segments(**RAGGED)
    x, weight, bias = (
        seeded(*shape, seed=18, dtype=dtype) for shape in ((step.num_rows, 300), (300, 4), (300,))
    )
    states = mx.array(step.states(3, 300)).astype(dtype)
    where = mx.array(step.array), mx.array(plan_conv_tiles(step.array))
    y, _ = causal_conv(Columns(x, 0), weight, bias, states, *where, new_ticket(), silu=True)
    mx.eval(y)  # MLX does not know that the state store is written
    return [mx.nan_to_num(states), y]


def recurrent_rows(dtype, form):
    """Two heads of k, more rows of a state than a threadgroup has; gates of some form.  No row is
    padding in one form: a read past the last row leaves the array."""
    step, k_dim = Segments(**RAGGED | {"padding": 0 if form == "ssm of logits" else 3}), 48
    rows = step.num_rows
    joined = seeded(rows, 4 * k_dim + 4 * 72, seed=18, dtype=dtype) / k_dim**0.5
    wide = [Columns(joined, start) for start in (0, 2 * k_dim, 4 * k_dim)]
    states, beta = mx.array(step.states(4, 72, k_dim)), mx.sigmoid(seeded(rows, 4, seed=19))
    norm, skip = None, seeded(4, seed=22) if "ssm" in form else None
    if form == "columns":
        gates = given(mx.sigmoid(seeded(rows, 4, k_dim, seed=20)), beta)
    elif form == "ssm":
        gates = given(mx.exp(beta * -mx.exp(seeded(4, seed=21))), beta)
    elif form == "logits":
        a, b = (Columns(seeded(rows, 12, seed=n, dtype=dtype), 4) for n in (23, 24))
        gates = delta_gates(a, b, seeded(4, seed=25), seeded(4, seed=26, dtype=dtype), beta_scale=2)
        norm = QKNorm(0.3, 1e-3)
    else:
        time = Columns(seeded(rows, 12, seed=23), 4)
        gates = time_gates(time, seeded(4, seed=25), mx.ones(4), (0.5, 2.0))
    how = {"max_seqlen": step.max_seqlen, "norm": norm, "skip": skip}
    y, _ = gated_delta(
        *wide, gates, states, mx.array(step.array), new_ticket(), num_k_heads=2, **how
    )
    mx.eval(y)  # MLX does not know that the state store is written
    return [mx.nan_to_num(states), y]


def gated_norm_rows(dtype, groups=5, dim=72):
    """More groups than a threadgroup serves, so the last threadgroup is not full."""
    x, z = (seeded(3, groups * dim, seed=n, dtype=dtype) for n in (27, 28))
    weight = seeded(groups * dim, seed=29, dtype=dtype)
    return [gated_rms_norm(x, Columns(z, 0), weight, 1e-5, dim=dim)]


_RECURRENT = {"use": RECURRENT, "serving": ServingCase(tiny="qwen3_next")}
RECURRENT_KERNELS = {
    "causal_conv": KernelTest(
        # The first row of a segment is not read.
        ("from + j >= begin ?", "from + j > begin ?"),
        {"": causal_conv_rows},
        faults=("is wrong", "does not compile"),
        store="writes",
        **_RECURRENT,
    ),
    "gated_delta": KernelTest(
        # A row does not see itself.
        ("y + delta * both", "y"),
        {
            "": partial(recurrent_rows, form="columns"),
            "ssm": partial(recurrent_rows, form="ssm"),
            "fused": partial(recurrent_rows, form="logits"),
            "fused_ssm": partial(recurrent_rows, form="ssm of logits"),
        },
        faults=("is wrong", "raises"),
        store="writes",
        **_RECURRENT,
    ),
    "gated_rms_norm": KernelTest(
        # The gate is that of another group.
        ("Z_START + group * DIM", "Z_START + group / 2 * DIM"),
        {"": gated_norm_rows, "long": partial(gated_norm_rows, groups=1, dim=900)},
        **_RECURRENT,
    ),
}
