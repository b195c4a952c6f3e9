"""Thoughts in a channel: a budget for all of them, with a form of the answer and without."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.chat.guided import accept, allowed, walk
from tests.support.engine.slots import SlotConstraint
from vllm_metal_lite.structured_outputs.thinking import Thinking
from vllm_metal_lite.structured_params import ThinkingParams

V, EOS = 70, 69
# channel, analysis, message; end, start
START, END = (60, 61, 62), (63, 64)


def channel(budget, inner=None) -> Thinking:
    params = ThinkingParams(START, END, False, budget, is_channel=True)
    return Thinking(params, inner, V, [EOS])


def test_the_budget_ends_the_thoughts_by_forced_tokens():
    limits = channel(2)
    accept(limits, *START, 5)
    assert limits.forced() == []
    assert allowed(limits, V) is None
    accept(limits, 6)
    assert limits.forced() == [63, 64]
    assert allowed(limits, V) == {63}
    accept(limits, 63)
    assert limits.forced() == [64]
    assert allowed(limits, V) == {64}
    limits.rollback(2)
    assert limits.forced() == []
    accept(limits, 6, 63, 64)
    assert limits.forced() == []


def test_thoughts_do_not_begin_again():
    limits = channel(1)
    accept(limits, *START, 5, *END)
    assert allowed(limits, V) is None
    accept(limits, 60)
    assert allowed(limits, V) == set(range(V)) - {61}


def test_the_budget_is_that_of_all_thoughts():
    limits = channel(3)
    accept(limits, *START, 5, 6, *END)
    assert limits.forced() == []
    accept(limits, *START, 7)
    assert limits.forced() == [63, 64]


def test_no_budget_means_no_thoughts():
    limits = channel(0)
    accept(limits, 60)
    assert allowed(limits, V) == set(range(V)) - {61}


def test_thoughts_end_where_the_form_lets_them():
    inner = SlotConstraint([[60], [61], [62], [5, 63], [6, 10], [7, 63], [8, 9]], V)
    limits = channel(1, inner)
    accept(limits, *START)
    assert allowed(limits, V) == {5, 63}
    accept(limits, 5)
    assert limits.forced() == []
    assert allowed(limits, V) == {6, 10}
    accept(limits, 6)
    assert limits.forced() == [63]
    assert allowed(limits, V) == {63}
    accept(limits, 63)
    assert allowed(limits, V) == {8, 9}


@given(seed=st.integers(0, 10**6), budget=st.none() | st.integers(0, 4))
def test_random_answers(seed, budget):
    tokens = walk(channel(budget), V, np.random.default_rng(seed), 200, EOS)
    thinking, count = False, 0
    for i, token in enumerate(tokens):
        if thinking:
            thinking = token != END[0]
            count += thinking
        else:
            thinking = tuple(tokens[max(i - 2, 0) : i + 1]) == START
    assert budget is None or count <= budget
