"""Steps of a recurrent layer one after another: a convolution, and the recurrence of what it gives.

Executed on the CPU host in every kind of order that declared arrays allow.
"""

import random

import numpy as np
import pytest

from metal.host import compiler_available, installed
from tests.support.declared_order import recording
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.recurrence import given
from vllm_metal_lite.kernels.segments import EMPTY, plan_segments

pytestmark = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")

HEADS, K_DIM, V_DIM, SLOTS = 2, 16, 8, 5
CHANNELS = HEADS * (2 * K_DIM + V_DIM)
# Steps as (rows, initial slot, final slot) of each segment.  Two prompts; their decodes; a chunk of
# the first, which leaves a checkpoint in slot 4; a third request takes slot 1 over and starts from
# the checkpoint.
STEPS = [
    [(11, EMPTY, 0), (3, EMPTY, 1)],
    [(1, 0, 0), (1, 1, 1)],
    [(9, 0, 0), (1, 1, 1)],
    [(1, 0, 0), (2, 4, 1)],
]
CHECKPOINTS = {2: [(0, 6, 4)]}


def draw(seed, *shape):
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)) / 4


def run_steps(ordered=True):
    """Launch all steps; returns the pools and the results of each step.  Not ordered: no launch
    takes the token of the one before."""
    carried = mx.full((SLOTS, 3, CHANNELS), float("nan"))
    states = mx.full((SLOTS, HEADS, V_DIM, K_DIM), float("nan"))
    mx.eval(carried, states)
    weight, first = draw(0, CHANNELS, 4), new_token()
    token, results = first, []
    for n, step in enumerate(STEPS):
        lengths, initial, final = (np.array(column, np.int32) for column in zip(*step, strict=True))
        rows = int(lengths.sum())
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
        plan = plan_segments(cu_seqlens, initial, final, rows, CHECKPOINTS.get(n, ()))
        segments, tiles = mx.array(plan), mx.array(plan_conv_tiles(plan))
        x, gates, beta = draw(n + 1, rows, CHANNELS), draw(n + 9, rows, HEADS), draw(n, rows, HEADS)
        mx.eval(x, gates, beta, segments, tiles)
        mixed, token = causal_conv(
            Columns(x, 0), weight, None, carried, segments, tiles, token if ordered else first,
            silu=True,
        )  # fmt: skip
        starts = (0, HEADS * K_DIM, 2 * HEADS * K_DIM)
        y, token = gated_delta(
            *(Columns(mixed, start) for start in starts), given(gates, beta), states, segments,
            token if ordered else first, num_k_heads=HEADS, max_seqlen=int(lengths.max()),
        )  # fmt: skip
        results.append(y)
    return carried, states, results


def in_order():
    with installed(checked=True, writable_inputs=["states"]):
        carried, states, results = run_steps()
        return [np.array(a) for a in (*results, carried, states)]


def by_declaration(pick, ordered=True):
    with recording() as launches:
        carried, states, results = run_steps(ordered)
    with installed(writable_inputs=["states"]):
        done = launches.run(pick)
    return [np.array(a) for a in (*(done[id(y)] for y in results), carried, states)]


ORDERS = {"first": min, "last": max, **{str(n): random.Random(n).choice for n in range(3)}}


def test_only_slots_that_are_named_are_read_and_written():
    *results, carried, states = in_order()
    assert all(np.isfinite(y).all() for y in results)
    for pool in (carried, states):
        assert [slot for slot in range(SLOTS) if np.isnan(pool[slot]).any()] == [2, 3]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_that_is_declared_gives_the_same_result(order):
    for got, wanted in zip(by_declaration(ORDERS[order]), in_order(), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_without_tokens_some_order_gives_another_result():
    pairs = zip(by_declaration(max, ordered=False), in_order(), strict=True)
    assert not all(np.array_equal(got, wanted, equal_nan=True) for got, wanted in pairs)
