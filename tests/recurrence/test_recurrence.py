"""The reference and the kernels of recurrent layers: the same rows, the same state store.

Slots that no segment starts from hold NaN before a step, so a wrong slot shows in the rows.
"""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal.host import installed
from tests.support.models.recurrent_steps import (
    PackedSpans,
    Span,
    bits,
    kernels,
    packed_spans,
    reference,
    run,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, SegmentState
from vllm_metal_lite.kernels.recurrence import QKNorm
from vllm_metal_lite.kernels.served_shapes import recurrence_problem
from vllm_metal_lite.kv.state_store import Key
from vllm_metal_lite.recurrence.base import CausalConv, GatedDelta, StateSpace, StepRecurrence
from vllm_metal_lite.specs import ConvShape, RecurrenceShape

CHANNELS, SIZE = 12, 4
K_HEADS, HEADS, K_DIM, V_DIM = 2, 4, 16, 8


def unit(x: mx.array) -> mx.array:
    return x / mx.linalg.norm(x, axis=-1, keepdims=True)


def rows(step: PackedSpans, name: str, *inner: int) -> mx.array:
    """As mlx-lm's modules see a packed step: (N, 1, ...)."""
    return step.rows(name, *inner)[:, None]


def conv(
    recurrence: StepRecurrence, key: Key, step: PackedSpans, *, bias: bool, silu: bool
) -> mx.array:
    return recurrence.causal_conv(
        key,
        CausalConv(
            rows(step, "x", CHANNELS),
            step.parameter("weight", CHANNELS, SIZE, 1),
            step.parameter("bias", CHANNELS) if bias else None,
            silu,
        ),
    )


def delta(
    recurrence: StepRecurrence, key: Key, step: PackedSpans, *, vector: bool = False, **how: object
) -> mx.array:
    inner = (HEADS, K_DIM) if vector else (HEADS,)
    return recurrence.gated_delta(
        key,
        GatedDelta(
            unit(rows(step, "q", K_HEADS, K_DIM)),
            unit(rows(step, "k", K_HEADS, K_DIM)),
            rows(step, "v", HEADS, V_DIM),
            rows(step, "a", *inner),
            rows(step, "b", HEADS),
            # Kimi has one A_log a head.
            step.parameter("A_log", HEADS, 1) if vector else step.parameter("A_log", HEADS),
            step.parameter("dt_bias", *inner),
            **how,
        ),
    )


def state_space(recurrence: StepRecurrence, key: Key, step: PackedSpans) -> mx.array:
    return recurrence.state_space(
        key,
        StateSpace(
            rows(step, "x", HEADS, V_DIM),
            step.parameter("A_log", HEADS),
            rows(step, "b", K_HEADS, K_DIM),
            rows(step, "c", K_HEADS, K_DIM),
            step.parameter("d", HEADS),
            rows(step, "dt", HEADS),
            step.parameter("dt_bias", HEADS),
            (0.01, 2.0),
        ),
    )


CONV, LINEAR = (SIZE - 1, CHANNELS), (HEADS, V_DIM, K_DIM)
# The shape of a state, and the call.
CALLS = {
    "convolution": (CONV, partial(conv, bias=False, silu=False)),
    "convolution, bias, SiLU": (CONV, partial(conv, bias=True, silu=True)),
    "gated delta": (LINEAR, delta),
    "gated delta, negative eigenvalues": (LINEAR, partial(delta, allow_neg_eigval=True)),
    "gated delta, a gate per column": (LINEAR, partial(delta, vector=True)),
    "gated delta, keys before their norm": (LINEAR, partial(delta, norm=QKNorm(0.25, 1e-6))),
    "gated delta, lower bound": (LINEAR, partial(delta, vector=True, lower_bound=-5.0)),
    "state space": (LINEAR, state_space),
}
FORMS = {"reference": reference, "kernels": kernels}
# Sums of some 20 terms of size 1, in another order.
close = partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)

on_host = partial(installed, writable_inputs=["states"])
each_call = pytest.mark.parametrize("name", CALLS)
each_form = pytest.mark.parametrize("form", FORMS)


@each_call
@given(step=packed_spans())
@settings(max_examples=25)
def test_reference_and_kernels_give_the_same_rows_and_the_same_pool(name, step):
    shape, call = CALLS[name]
    rows, states = run(reference, step, step.states(*shape), call)
    with on_host():
        kernel_rows, kernel_states = run(kernels, step, step.states(*shape), call)
    assert np.isfinite(rows).all()
    close(kernel_rows, rows)
    close(kernel_states, states)


@each_form
@each_call
@given(step=packed_spans())
@settings(max_examples=12)
def test_exactly_the_slots_that_a_step_names_are_written(form, name, step):
    shape, call = CALLS[name]
    before = step.states(*shape)
    with on_host():
        _, after = run(FORMS[form], step, before, call)
    others = [slot for slot in range(step.num_slots) if slot not in step.written]
    np.testing.assert_array_equal(bits(after[others]), bits(before[others]))
    assert np.isfinite(after[sorted(step.written)]).all()


@each_form
@each_call
@given(step=packed_spans(), data=st.data())
@settings(max_examples=10)
def test_rows_and_states_of_a_request_do_not_depend_on_who_runs_beside(form, name, step, data):
    index = data.draw(st.integers(0, len(step.spans) - 1))
    shape, call = CALLS[name]
    part = step.alone(index)
    with on_host():
        rows, states = run(FORMS[form], step, step.states(*shape), call)
        own_rows, own_states = run(FORMS[form], part, part.states(*shape), call)
    close(rows[step.rows_of(index)], own_rows)
    close(states[sorted(part.written)], own_states[sorted(part.written)])


@each_form
@each_call
def test_a_request_goes_on_from_a_checkpoint_and_leaves_the_checkpoint_as_it_is(form, name):
    shape, call = CALLS[name]
    whole = PackedSpans((Span(0, 20, SegmentState(EMPTY_SLOT, 3, ((11, 1),))),), num_slots=5)
    rest = PackedSpans((Span(11, 9, SegmentState(1, 4)),), num_slots=5, first=11)
    with on_host():
        rows, states = run(FORMS[form], whole, whole.states(*shape), call)
        rest_rows, rest_states = run(FORMS[form], rest, states, call)
    close(rest_rows, rows[11:])
    close(rest_states[4], states[3])
    np.testing.assert_array_equal(bits(rest_states[:4]), bits(states[:4]))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (ConvShape(64, 9, False, True, mx.float16), "there is no kernel for a 64 channels by 9"),
        (ConvShape(7, 4, False, True, mx.float16), "there is no kernel for a 7 channels"),
        (ConvShape(64, 4, False, True, mx.int32), "there are no kernels for mlx.core.int32"),
        (RecurrenceShape(2, 4, 24, 8, mx.float16), "key size 24 is not"),
        (
            RecurrenceShape(2, 4, 272, 8, mx.float32),
            "key size 272 is not a multiple of 16 up to 256",
        ),
        (RecurrenceShape(2, 4, 16, 12, mx.float32), "head size 12 is not a multiple of 8"),
        (RecurrenceShape(2, 4, 16, 8, mx.int32), "no kernels for mlx.core.int32"),
    ],
)
def test_layers_that_no_kernel_serves_are_named(shape, message):
    assert message in recurrence_problem(shape)
