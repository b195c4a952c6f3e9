"""Checks the kernels of recurrent layers on this device.

The reference is the definition, in NumPy in float64.  Each check runs two steps: prompts, chunks
and decodes together, with checkpoints and rows of padding; then decodes of the states that the
first step left.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.case import draw
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.result import TOLERANCE, largest_error
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.segments import EMPTY, plan_segments
from vllm_metal_lite.kernels.ssm import ssm_update
from vllm_metal_lite.specs import ConvShape, KernelUse, RecurrenceShape

Found = tuple[float, float]

_SLOTS = 8


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
        return plan_segments(starts, initial, final, self.num_rows, _SLOTS, taken)


# A decode, a whole prompt, a chunk behind a state that stays as it is, a segment without rows.
_STEPS = (
    _Step((1, 21, 18, 0), (0, EMPTY, 1, 2), (0, 3, 4, 2), ((1, 16, 5), (2, 3, 6))),
    _Step((1, 1, 2), (3, 6, 5), (3, 6, 7)),
)
_GIVEN = (0, 1, 2)  # the slots that hold a state at the start; others are NaN


def full_list() -> list[KernelUse]:
    """Uses that vary each dimension in turn, far more than one model has."""
    uses = []
    for dtype in TOLERANCE:
        uses += [
            KernelUse((), 16, recurrences=(ConvShape(channels, size, bias, silu, dtype),))
            for channels, size, bias, silu in (
                (64, 2, False, False), (300, 3, True, False), (2048, 4, False, True),
            )
        ]  # fmt: skip
        uses += [
            KernelUse((), 16, recurrences=(RecurrenceShape(*heads, dtype, delta, vector),))
            for heads in ((1, 3, 64, 64), (4, 8, 128, 128), (2, 2, 256, 40))
            for delta, vector in ((True, False), (True, True), (False, False))
        ]
    return uses


def convolution(check: Check) -> Found:
    shape, rng = check.recurrence, np.random.default_rng(0)
    assert isinstance(shape, ConvShape)
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


def recurrence(check: Check) -> Found:
    shape, rng = check.recurrence, np.random.default_rng(0)
    assert isinstance(shape, RecurrenceShape)
    dtype, heads, k_dim = shape.dtype, shape.v_heads, shape.k_dim
    pool = _pool(rng, (heads, shape.v_dim, k_dim), mx.float32)
    states = mx.array(pool)
    mx.eval(states)
    inputs = [_Rows(shape, step.num_rows, rng) for step in _STEPS]
    skip = rng.standard_normal(heads).astype(np.float32)
    a = -rng.uniform(0.1, 1, heads).astype(np.float32)

    def launch(n: int, segments: np.ndarray, token: mx.array) -> tuple[mx.array, mx.array]:
        rows = inputs[n]
        q, k, v = (Columns(mx.array(x.reshape(len(x), -1)).astype(dtype), 0) for x in rows.qkv)
        beta, where = mx.array(rows.beta), mx.array(segments)
        longest = max(_STEPS[n].rows)
        if shape.delta:
            return gated_delta(
                q, k, v, mx.array(rows.gates), beta, states, where, token,
                num_k_heads=shape.k_heads, max_seqlen=longest,
            )  # fmt: skip
        return ssm_update(
            v, k, q, beta, mx.array(a), mx.array(skip), states, where, token,
            num_groups=shape.k_heads, max_seqlen=longest,
        )  # fmt: skip

    def advance(n: int, state: np.ndarray, of: slice) -> tuple[np.ndarray, np.ndarray]:
        rows, results = inputs[n], [np.zeros((0, heads, shape.v_dim))]
        for t in range(of.start, of.stop):
            q, k = (np.repeat(x[t], heads // shape.k_heads, axis=0) for x in rows.qkv[:2])
            v, beta = rows.qkv[2][t], rows.beta[t, :, None]
            gates = rows.gates[t] if shape.delta else np.exp(rows.beta[t] * a)
            state = state * gates.reshape(heads, 1, -1)
            if shape.delta:
                v = v - (state @ k[:, :, None])[..., 0]
            state = state + (beta * v)[:, :, None] * k[:, None]
            y = (state @ q[:, :, None])[..., 0]
            results.append((y if shape.delta else y + skip[:, None] * v)[None])
        return np.concatenate(results), state

    return _compare(launch, advance, pool, states, dtype)


class _Rows:
    """q and k of about unit length, v, gates and beta of a step."""

    def __init__(self, shape: RecurrenceShape, rows: int, rng: np.random.Generator) -> None:
        of_k = rows, shape.k_heads, shape.k_dim
        q, k = (draw(rng, of_k, shape.dtype) / 2 ** round(np.log2(shape.k_dim) / 2) for _ in "qk")
        self.qkv = q, k, draw(rng, (rows, shape.v_heads, shape.v_dim), shape.dtype)
        gates = (rows, shape.v_heads, shape.k_dim) if shape.vector else (rows, shape.v_heads)
        self.gates = rng.uniform(0.5, 1, gates).astype(np.float32)
        self.beta = rng.uniform(0, 1, (rows, shape.v_heads)).astype(np.float32)


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


CHECKS: dict[str, Callable[[Check], Found]] = {
    "causal_conv": convolution,
    "gated_delta": recurrence,
}
