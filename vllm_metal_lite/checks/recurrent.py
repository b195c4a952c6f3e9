"""The kernels of recurrent layers: when a model uses them, their checks, and their timing.

The reference is their fallback, mlx-lm's functions, in float32 on this machine's CPU.  Each check
runs three steps: prompts, chunks and decodes together, with checkpoints and rows of padding; rows
that continue these states; and decodes alone, which load no tiles.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, ForwardBatch, SegmentState
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.checks.check import Check, Loads, Pair
from vllm_metal_lite.checks.values import EPS, ROWS, TOLERANCE, draw, largest, largest_error
from vllm_metal_lite.kernels.arguments import Columns
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.kernels.recurrence import QKNorm
from vllm_metal_lite.kernels.store import new_ticket
from vllm_metal_lite.kv.state_store import Key, StateSpec, StateStore
from vllm_metal_lite.recurrence.base import CausalConv, GatedDelta, StateSpace, StepRecurrence
from vllm_metal_lite.recurrence.kernels import KernelRecurrence, SegmentPlan
from vllm_metal_lite.recurrence.reference import ReferenceRecurrence
from vllm_metal_lite.specs import ConvShape, GatedNormShape, KernelUse, RecurrenceShape

# `gated_delta` also computes the state space update.
_KERNELS = {
    ConvShape: "causal_conv",
    RecurrenceShape: "gated_delta",
    GatedNormShape: "gated_rms_norm",
}
_SLOTS, _PADDING = 8, 1
_KEY: Key = (0, 0)
_GIVEN = (0, 1, 2)  # the slots that hold a state at the start; others are NaN


# The tokens of a segment that were computed before, its rows, and its states.
_Segment = tuple[int, int, SegmentState]
# A decode, a whole prompt, and a chunk after a state that stays as it is.
_STEPS: tuple[tuple[_Segment, ...], ...] = (
    (
        (4, 1, SegmentState(0, 0)),
        (0, 21, SegmentState(EMPTY_SLOT, 3, [(16, 5)])),
        (9, 18, SegmentState(1, 4, [(12, 6)])),
    ),
    (
        (21, 1, SegmentState(3, 3)),
        (12, 1, SegmentState(6, 6)),
        (16, 2, SegmentState(5, 7)),
    ),
    ((22, 1, SegmentState(3, 3)), (18, 1, SegmentState(7, 7))),
)
_NUM_ROWS = [sum(rows for _, rows, _ in step) + _PADDING for step in _STEPS]

# A function that does a layer's work in a step, given its index in _STEPS and the type of rows.
LayerStep = Callable[[StepRecurrence, int, mx.Dtype], mx.array]


def checks(use: KernelUse) -> list[Check]:
    return [Check(_KERNELS[type(shape)], shape) for shape in use.recurrences]


def convolution(check: Check[ConvShape]) -> float:
    shape, rng = check.shape, np.random.default_rng(0)
    channels, size = shape.channels, shape.kernel_size
    weight = draw(rng, (channels, size, 1), shape.dtype)
    bias = draw(rng, (channels,), shape.dtype) if shape.bias else None
    rows = [draw(rng, (count, 1, channels), shape.dtype) for count in _NUM_ROWS]

    def work(recurrence: StepRecurrence, step: int, dtype: mx.Dtype) -> mx.array:
        x, taps = (mx.array(a).astype(dtype) for a in (rows[step], weight))
        offset = None if bias is None else mx.array(bias).astype(dtype)
        return recurrence.causal_conv(_KEY, CausalConv(x, taps, offset, shape.silu))

    states = draw(rng, (len(_GIVEN), size - 1, channels), shape.dtype)
    return _compare(work, states, shape.dtype, shape.dtype)


def recurrence(check: Check[RecurrenceShape]) -> float:
    """The kernel gets logits of gates; the delta rule also normalises q and k."""
    shape, rng = check.shape, np.random.default_rng(0)
    # Keys have about unit length.  Behind a norm results are small, so values are large instead.  A
    # power of 2 rounds nothing.
    unit = 2.0 ** round(np.log2(shape.k_dim) / 2)
    k_scale, v_scale = (1, unit) if shape.delta else (1 / unit, 1)
    of_k, heads = (shape.k_heads, shape.k_dim), (shape.v_heads,)
    of_gates = (*heads, shape.k_dim) if shape.vector else heads
    sizes = of_k, of_k, (*heads, shape.v_dim), of_gates, heads
    scales = k_scale, k_scale, v_scale, 1, 1
    rows = [
        [draw(rng, (n, 1, *size), shape.dtype) * s for size, s in zip(sizes, scales, strict=True)]
        for n in _NUM_ROWS
    ]
    bias, skip = rng.standard_normal(of_gates), rng.standard_normal(heads)
    a_log = rng.uniform(-2, 0.5, heads).reshape(*heads, *[1] * shape.vector)

    def work(recurrence: StepRecurrence, step: int, dtype: mx.Dtype) -> mx.array:
        q, k, v, a, b = (mx.array(x).astype(dtype) for x in rows[step])
        rate, offset, d = (mx.array(x.astype(np.float32)) for x in (a_log, bias, skip))
        if not shape.delta:
            return recurrence.state_space(_KEY, StateSpace(v, rate, k, q, d, a, offset))
        norm = QKNorm(shape.k_dim**-0.5, 1e-6)
        return recurrence.gated_delta(_KEY, GatedDelta(q, k, v, a, b, rate, offset, norm=norm))

    states = rng.standard_normal((len(_GIVEN), *heads, shape.v_dim, shape.k_dim)) * v_scale
    return _compare(work, states, mx.float32, shape.dtype)


def gated_norm(check: Check[GatedNormShape]) -> float:
    """The gate has columns of a wider array."""
    shape, rng = check.shape, np.random.default_rng(0)
    dtype, width = shape.dtype, shape.groups * shape.dim
    x, gate = draw(rng, (ROWS, width), dtype), draw(rng, (ROWS, width + 8), dtype)
    weight = draw(rng, (width if shape.gate_first else shape.dim,), dtype)
    arrays = mx.array(x), mx.array(gate), mx.array(weight)
    hidden, gates, gain = (array.astype(dtype) for array in arrays)
    kind = {"gate_first": shape.gate_first, "sigmoid": shape.sigmoid}
    got = gated_rms_norm(hidden, Columns(gates, 8), gain, EPS, dim=shape.dim, **kind)
    z = gate[:, 8:].astype(np.float64)
    act = (1 if shape.sigmoid else z) / (1 + np.exp(-z))
    rows = (x * act if shape.gate_first else x).reshape(ROWS, -1, shape.dim)
    rows = rows / np.sqrt((rows.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPS)
    expected = (rows * weight.reshape(-1, shape.dim)).reshape(ROWS, width)
    return largest_error(got, expected if shape.gate_first else expected * act, TOLERANCE[dtype])


def timed_gated_norm(check: Check[GatedNormShape], loads: Loads) -> list[Pair]:
    """Timed for the norm before the gate; the other order has as many launches."""
    shape = check.shape
    x = mx.random.normal((loads.rows, shape.groups, shape.dim)).astype(shape.dtype)
    weight, z = mx.ones(shape.dim, shape.dtype), Columns(x.reshape(loads.rows, -1), 0)
    mx.eval(x, weight, z.array)

    def unfused() -> mx.array:
        return mx.fast.rms_norm(x, weight, EPS) * (x * mx.sigmoid(x))

    fused = partial(gated_rms_norm, x, z, weight, EPS, dim=shape.dim)
    return [(fused, mx.compile(unfused))]


def _compare(work: LayerStep, states: np.ndarray, state_dtype: mx.Dtype, dtype: mx.Dtype) -> float:
    """The error of the steps by the kernels.  states: those of the slots _GIVEN, kept in
    state_dtype."""
    batches, order = list(map(_batch, _STEPS)), SimpleNamespace(ticket=new_ticket())
    state_store, got = _state_store(states, state_dtype), []
    for step, (batch, count) in enumerate(zip(batches, _NUM_ROWS, strict=True)):
        plan = SegmentPlan.plan(batch, count)
        got.append(work(KernelRecurrence(state_store, plan, order), step, dtype))
    mx.eval(got, order.ticket)
    mx.disable_compile()  # on a CPU it needs a C++ compiler
    try:
        with mx.stream(mx.cpu):
            after = _state_store(states, mx.float32)
            expected = [
                np.array(work(ReferenceRecurrence(after, batch, count), step, mx.float32))
                for step, (batch, count) in enumerate(zip(batches, _NUM_ROWS, strict=True))
            ]
    finally:
        mx.enable_compile()
    for rows in expected:
        rows[-_PADDING:] = 0
    error = largest_error(state_store[_KEY], np.array(after[_KEY]), TOLERANCE[state_dtype])
    return max(largest(got, expected, TOLERANCE[dtype]), error)


def _batch(step: tuple[_Segment, ...]) -> ForwardBatch:
    inputs = InputBatch(len(step), 64, block_size=16)
    starts, rows, states = zip(*step, strict=True)
    seats = [inputs.add([0] * (start + count), 0) for start, count, _ in step]
    return inputs.pack(np.array(seats), np.array(starts), np.array(rows), states)


def _state_store(states: np.ndarray, dtype: mx.Dtype) -> StateStore:
    state_store = StateStore([StateSpec(_KEY, states.shape[1:], dtype)], _SLOTS)
    whole = np.full((_SLOTS, *states.shape[1:]), np.nan, np.float32)
    whole[list(_GIVEN)] = states
    state_store.write(_KEY, mx.arange(_SLOTS), mx.array(whole).astype(dtype))
    mx.eval(state_store.arrays)
    return state_store
