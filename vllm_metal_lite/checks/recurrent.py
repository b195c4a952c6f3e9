"""Checks the kernels of recurrent layers on this device.

The reference is the definition, in NumPy in float64.  Each check runs two steps: prompts, chunks
and decodes together, with checkpoints and rows of padding; then decodes of the states that the
first step left.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.case import draw
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.result import TOLERANCE, Found, largest_error
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.gated_delta import fused_gated_delta, gated_delta
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.recurrence import Norm, column_gates, delta_gates, time_gates
from vllm_metal_lite.kernels.segments import EMPTY, plan_segments
from vllm_metal_lite.kernels.ssm import fused_ssm_update, ssm_update
from vllm_metal_lite.specs import ConvShape, GatedNormShape, RecurrenceShape

_SLOTS, _EPS = 8, 1e-5


@dataclass(frozen=True)
class _Step:
    """rows: of each segment.  checkpoints: (segment, rows of it before, slot)."""

    rows: tuple[int, ...]
    initial: tuple[int, ...]
    final: tuple[int, ...]
    checkpoints: tuple[tuple[int, int, int], ...] = ()
    padding: int = 1

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *self.rows])

    @property
    def num_rows(self) -> int:
        return sum(self.rows) + self.padding

    @property
    def segments(self) -> np.ndarray:
        initial, final = np.array(self.initial), np.array(self.final)
        starts = self.starts
        taken = [(s, int(starts[s]) + row, slot) for s, row, slot in self.checkpoints]
        return plan_segments(starts, initial, final, self.num_rows, taken)


# A decode, a whole prompt, a chunk behind a state that stays as it is, a segment without rows.
_STEPS = (
    _Step((1, 21, 18, 0), (0, EMPTY, 1, 2), (0, 3, 4, 2), ((1, 16, 5), (2, 3, 6))),
    _Step((1, 1, 2), (3, 6, 5), (3, 6, 7)),
)
_GIVEN = (0, 1, 2)  # the slots that hold a state at the start; others are NaN


def convolution(check: Check[ConvShape]) -> Found:
    shape, rng = check.shape, np.random.default_rng(0)
    channels, size, dtype = shape.channels, shape.kernel_size, shape.dtype
    weight = draw(rng, (channels, size), dtype)
    bias = draw(rng, (channels,), dtype) if shape.bias else None
    pool = _pool(rng, (size - 1, channels), dtype)
    states, taps, offset = (
        None if a is None else mx.array(a).astype(dtype) for a in (pool, weight, bias)
    )
    assert states is not None
    assert taps is not None
    mx.eval(states)
    rows = [draw(rng, (step.num_rows, channels), dtype) for step in _STEPS]

    def launch(n: int, segments: np.ndarray, token: mx.array) -> tuple[mx.array, mx.array]:
        x, tiles = mx.array(rows[n]).astype(dtype), mx.array(plan_conv_tiles(segments))
        return causal_conv(
            Columns(x, 0), taps, offset, states, mx.array(segments), tiles, token, silu=shape.silu
        )

    def advance(n: int, state: np.ndarray, of: slice) -> tuple[np.ndarray, np.ndarray]:
        seen = np.concatenate([state, rows[n][of]]).astype(np.float64)
        count = len(seen) - size + 1
        y = sum(seen[j : j + count] * weight[:, j] for j in range(size))
        y = y + (0 if bias is None else bias)
        return (y / (1 + np.exp(-y)) if shape.silu else y), seen[count:]

    return _compare(launch, advance, pool, states, dtype)


def recurrence(check: Check[RecurrenceShape]) -> Found:
    shape, rng = check.shape, np.random.default_rng(0)
    dtype, heads = shape.dtype, shape.v_heads
    layer = _Layer(shape, rng)
    pool = _pool(rng, (heads, shape.v_dim, shape.k_dim), mx.float32) * layer.size
    states = mx.array(pool)
    mx.eval(states)
    inputs = [_Rows(layer, step.num_rows, rng) for step in _STEPS]

    def launch(n: int, segments: np.ndarray, token: mx.array) -> tuple[mx.array, mx.array]:
        return inputs[n].launch(states, mx.array(segments), token, max(_STEPS[n].rows))

    def advance(n: int, state: np.ndarray, of: slice) -> tuple[np.ndarray, np.ndarray]:
        rows, results = inputs[n], [np.zeros((0, heads, shape.v_dim))]
        for t in range(of.start, of.stop):
            q, k = (np.repeat(x[t], heads // shape.k_heads, axis=0) for x in (rows.q, rows.k))
            v, added = rows.v[t], rows.v[t]
            state = state * rows.gates[t].reshape(heads, 1, -1)
            if shape.delta:
                added = v - (state @ k[:, :, None])[..., 0]
            state = state + (rows.beta[t, :, None] * added)[:, :, None] * k[:, None]
            y = (state @ q[:, :, None])[..., 0]
            results.append((y if shape.delta else y + layer.skip[:, None] * v)[None])
        return np.concatenate(results), state

    return _compare(launch, advance, pool, states, dtype)


class _Layer:
    """What a layer has for each head of v."""

    def __init__(self, shape: RecurrenceShape, rng: np.random.Generator) -> None:
        self.shape = shape
        self.skip = rng.standard_normal(shape.v_heads).astype(np.float32)
        self.a_log = rng.uniform(-2, 0.5, shape.v_heads).astype(np.float32)
        self.bias = draw(rng, (shape.v_heads,), shape.dtype)
        self.norm = Norm(1e-6, shape.k_dim**-0.5)
        # Of states and values, so that results have size 1; a power of 2, which rounds nothing.
        self.size = self.unit = 2.0 ** round(np.log2(shape.k_dim) / 2)
        if not (shape.fused and shape.delta):
            self.size = 1.0


class _Rows:
    """The rows of a step: what the kernel is given (raw), and what the definition takes."""

    def __init__(self, layer: _Layer, rows: int, rng: np.random.Generator) -> None:
        shape = self._shape = layer.shape
        self._layer, heads = layer, (rows, shape.v_heads)
        of_k = rows, shape.k_heads, shape.k_dim
        self._raw_q, self._raw_k = (draw(rng, of_k, shape.dtype) for _ in "qk")
        self._a, self._b = (draw(rng, heads, shape.dtype) for _ in "ab")
        self.v = draw(rng, (*heads, shape.v_dim), shape.dtype) * layer.size
        if not (shape.fused and shape.delta):  # of about unit length
            self._raw_q, self._raw_k = self._raw_q / layer.unit, self._raw_k / layer.unit
        self.q, self.k = self._raw_q, self._raw_k
        if shape.fused and shape.delta:
            self.q, self.k = (
                x / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + layer.norm.eps)
                for x in (self._raw_q, self._raw_k)
            )
            self.q = self.q * layer.norm.q_scale
        wide = (*heads, shape.k_dim) if shape.vector else heads
        self.gates = rng.uniform(0.5, 1, wide).astype(np.float32)
        self.beta = rng.uniform(0, 1, heads).astype(np.float32)
        rate, time = np.exp(layer.a_log), np.logaddexp(self._a + layer.bias, 0)
        if shape.fused:
            self.beta = 1 / (1 + np.exp(-self._b)) if shape.delta else time
        if not (shape.vector or (shape.delta and not shape.fused)):
            self.gates = np.exp(-rate * (time if shape.delta else self.beta))

    def launch(
        self, states: mx.array, segments: mx.array, token: mx.array, longest: int
    ) -> tuple[mx.array, mx.array]:
        shape, layer = self._shape, self._layer
        q, k, v, a, b = (
            Columns(mx.array(x.reshape(len(x), -1)).astype(shape.dtype), 0)
            for x in (self._raw_q, self._raw_k, self.v, self._a, self._b)
        )
        a_log, bias, skip = map(mx.array, (layer.a_log, layer.bias, layer.skip))
        beta, rest = mx.array(self.beta), (states, segments, token)
        how: dict[str, Any] = {"num_groups": shape.k_heads, "max_seqlen": longest}
        if not shape.delta:
            if shape.fused:
                made = time_gates(a, a_log, bias, (0.0, float("inf")))
                return fused_ssm_update(v, k, q, made, skip, *rest, **how)
            return ssm_update(v, k, q, beta, -mx.exp(a_log), skip, *rest, **how)
        how["num_k_heads"] = how.pop("num_groups")
        gates = mx.array(self.gates)
        if not shape.fused:
            return gated_delta(q, k, v, gates, beta, *rest, **how)
        made = delta_gates(a, b, a_log, bias)
        if shape.vector:
            made = column_gates(gates, b)
        return fused_gated_delta(q, k, v, made, *rest, norm=layer.norm, **how)


def gated_norm(check: Check[GatedNormShape]) -> Found:
    """Nine rows; the gate has columns of a wider array."""
    shape, rng = check.shape, np.random.default_rng(0)
    dtype, width = shape.dtype, shape.groups * shape.dim
    x, gate = draw(rng, (9, width), dtype), draw(rng, (9, width + 8), dtype)
    weight = draw(rng, (width if shape.gate_first else shape.dim,), dtype)
    got = gated_rms_norm(
        mx.array(x).astype(dtype), Columns(mx.array(gate).astype(dtype), 8),
        mx.array(weight).astype(dtype), _EPS, dim=shape.dim, gate_first=shape.gate_first,
        sigmoid=shape.sigmoid,
    )  # fmt: skip
    z = gate[:, 8:].astype(np.float64)
    act = (1 if shape.sigmoid else z) / (1 + np.exp(-z))
    rows = (x * act if shape.gate_first else x).reshape(9, -1, shape.dim)
    rows = rows / np.sqrt((rows.astype(np.float64) ** 2).mean(-1, keepdims=True) + _EPS)
    expected = (rows * weight.reshape(-1, shape.dim)).reshape(9, width)
    return largest_error(got, expected if shape.gate_first else expected * act), TOLERANCE[dtype]


def _pool(rng: np.random.Generator, state: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    pool = np.full((_SLOTS, *state), np.nan, np.float32)
    pool[list(_GIVEN)] = draw(rng, (len(_GIVEN), *state), dtype)
    return pool


def _compare(
    launch: Callable[[int, np.ndarray, mx.array], tuple[mx.array, mx.array]],
    advance: Callable[[int, np.ndarray, slice], tuple[np.ndarray, np.ndarray]],
    pool: np.ndarray,
    states: mx.array,
    dtype: mx.Dtype,
) -> Found:
    """Both steps by the kernel, and by `advance`; states count as float32 if they are."""
    token, results = new_token(), []
    for n, step in enumerate(_STEPS):
        y, token = launch(n, step.segments, token)
        results.append(y)
    mx.eval(results, token)
    error, after = 0.0, pool.astype(np.float64)
    for n, (step, y) in enumerate(zip(_STEPS, results, strict=True)):
        before, wanted = after.copy(), []
        for s, begin in enumerate(step.starts[:-1].tolist()):
            slot = step.initial[s]
            start = np.zeros_like(before[0]) if slot == EMPTY else before[slot]
            of, after[step.final[s]] = advance(n, start, slice(begin, begin + step.rows[s]))
            wanted.append(of)
            for segment, row, taken in step.checkpoints:
                if segment == s:
                    after[taken] = advance(n, start, slice(begin, begin + row))[1]
        expected = np.concatenate([*wanted, np.zeros((step.padding, *y.shape[1:]))])
        error = max(error, largest_error(y, expected))
    kept = largest_error(states, after)
    return max(error, kept * TOLERANCE[dtype] / TOLERANCE[states.dtype]), TOLERANCE[dtype]
