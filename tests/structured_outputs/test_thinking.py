"""Thoughts before an answer of a given form, or in a channel: unlimited, or up to a budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.chat.guided import accept, allowed, walk
from tests.support.chat.text import parse
from tests.support.engine.slots import SlotConstraint
from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.structured_outputs.thinking import ChannelThinking, Thinking
from vllm_metal_lite.structured_params import ThinkingParams

V, EOS = 70, 69
START, END = (60,), (61, 62)


def thinking(*, inner=True, is_open=False, budget=None, start=START) -> Thinking:
    form = SlotConstraint([[1, 2], [3], [EOS]], V) if inner else None
    return Thinking(ThinkingParams(start, END, is_open, budget), form, V, [EOS])


def test_an_answer_without_thoughts_has_its_form_at_once():
    limits = thinking()
    assert allowed(limits, V) == {1, 2, 60}
    accept(limits, 2)
    assert allowed(limits, V) == {3}
    limits.rollback(1)
    assert allowed(limits, V) == {1, 2, 60}


def test_within_thoughts_all_but_the_end_of_the_answer_may_come():
    limits = thinking()
    accept(limits, 60)
    assert allowed(limits, V) == set(range(V)) - {EOS}
    accept(limits, 5, 61, 5, 61, 62)
    assert allowed(limits, V) == {1, 2}
    limits.rollback(1)
    assert allowed(limits, V) == set(range(V)) - {EOS}


def test_thoughts_without_a_form_are_not_limited():
    limits = thinking(inner=False, is_open=True)
    assert allowed(limits, V) is None
    bits = np.ones(-(-V // 32), np.uint32)
    assert not limits.fill(bits)
    assert (bits == 1).all()
    accept(limits, *END)
    assert allowed(limits, V) is None


def test_no_budget_means_no_thoughts():
    assert allowed(thinking(budget=0), V) == {1, 2}
    assert thinking(is_open=True, budget=0).forced() == [61, 62]


def test_a_model_that_marks_only_the_end():
    assert allowed(thinking(start=()), V) == {1, 2}
    assert allowed(thinking(start=(), is_open=True), V) == set(range(V)) - {EOS}


@pytest.mark.parametrize("budget", [0, 5])
def test_an_answer_may_begin_like_thoughts(budget):
    free, limits = (thinking(inner=form, budget=budget, start=(2, 60)) for form in (False, True))
    accept(free, 2)
    accept(limits, 2)
    assert allowed(free, V) is None
    assert allowed(limits, V) == ({3, 60} if budget else {3})
    accept(limits, 3)
    assert allowed(limits, V) == {EOS}


def test_an_end_that_began_within_the_budget_is_completed():
    limits = thinking(is_open=True, budget=3)
    accept(limits, 5, 6, 61)
    limits.rollback(0)
    assert limits.forced() == [62]


@given(seed=st.integers(0, 10**6), is_open=st.booleans(), budget=st.none() | st.integers(0, 6))
def test_random_answers(seed, is_open, budget):
    limits = thinking(is_open=is_open, budget=budget)
    tokens = walk(limits, V, np.random.default_rng(seed), 60, EOS)
    if tokens[-1] != EOS:
        return
    assert tokens[-2] == 3
    assert tokens[-3] in (1, 2)
    thoughts = tokens[:-3]
    if thoughts or is_open:
        assert tuple(thoughts[-2:]) == END
        count = len(thoughts) - 2 - (0 if is_open else 1)
        assert budget is None or count <= max(budget, 0)


LETTERS = "</abhiknt> {}"
PIECES = st.sampled_from(["</think>", "</thi", "<think>", "k>", "<", "a", "}", "{", " "])


@given(pieces=st.lists(PIECES, max_size=8))
def test_thoughts_end_where_the_reader_of_the_answer_ends_them(pieces):
    """A token is a letter.  A prompt has opened the thoughts; the form gets what the user sees."""
    text, marks = "".join(pieces), FORMATS["thinking"].thoughts
    ids = {letter: i for i, letter in enumerate(LETTERS)}
    form = SlotConstraint([], len(LETTERS))
    params = ThinkingParams(*([ids[c] for c in mark] for mark in (marks.start, marks.end)), True)
    accept(Thinking(params, form, len(LETTERS), []), *(ids[c] for c in text))
    said = parse(FORMATS["thinking"], text, in_reasoning=True)
    begun = "".join(LETTERS[i] for i in form.seen)
    if not begun.lstrip().startswith("<"):  # the reader finds further thoughts, a form has none
        assert said.text == begun.lstrip()


# The tokens that begin thoughts (channel, analysis, message), and that end them (end, start).
CHANNEL, CHANNEL_END = (60, 61, 62), (63, 64)


def channel(budget, inner=None) -> ChannelThinking:
    params = ThinkingParams(CHANNEL, CHANNEL_END, False, budget, is_channel=True)
    return ChannelThinking(params, inner, V, [EOS])


@pytest.mark.parametrize(
    ("limits", "begin", "end"),
    [
        (lambda: thinking(inner=False, is_open=True, budget=2), (), END),
        (lambda: channel(2), CHANNEL, CHANNEL_END),
    ],
    ids=["open", "channel"],
)
def test_the_budget_ends_the_thoughts_by_forced_tokens(limits, begin, end):
    limits, (first, last) = limits(), end
    accept(limits, *begin, 5)
    assert limits.forced() == []
    assert allowed(limits, V) is None
    accept(limits, 6)
    assert limits.forced() == [first, last]
    assert allowed(limits, V) == {first}
    accept(limits, first)
    assert limits.forced() == [last]
    assert allowed(limits, V) == {last}
    limits.rollback(2)
    assert limits.forced() == []
    accept(limits, 6, first, last)
    assert limits.forced() == []
    assert allowed(limits, V) is None


@pytest.mark.parametrize("tokens", [(), (*CHANNEL, 5, *CHANNEL_END)], ids=["never", "again"])
def test_thoughts_do_not_begin_without_a_budget(tokens):
    limits = channel(1 if tokens else 0)
    accept(limits, *tokens)
    assert allowed(limits, V) is None
    accept(limits, 60)
    assert allowed(limits, V) == set(range(V)) - {61}


def test_the_budget_is_that_of_all_thoughts():
    limits = channel(3)
    accept(limits, *CHANNEL, 5, 6, *CHANNEL_END)
    assert limits.forced() == []
    accept(limits, *CHANNEL, 7)
    assert limits.forced() == [63, 64]


def test_thoughts_end_where_the_form_lets_them():
    inner = SlotConstraint([[60], [61], [62], [5, 63], [6, 10], [7, 63], [8, 9]], V)
    limits = channel(1, inner)
    accept(limits, *CHANNEL)
    assert allowed(limits, V) == {5, 63}
    accept(limits, 5)
    assert limits.forced() == []
    assert allowed(limits, V) == {6, 10}
    accept(limits, 6)
    assert allowed(limits, V) == {63}
    accept(limits, 63)
    assert allowed(limits, V) == {8, 9}


@given(seed=st.integers(0, 10**6), budget=st.none() | st.integers(0, 4))
def test_random_answers_with_channels(seed, budget):
    tokens = walk(channel(budget), V, np.random.default_rng(seed), 200, EOS)
    thinking, count = False, 0
    for i, token in enumerate(tokens):
        if thinking:
            thinking = token != CHANNEL_END[0]
            count += thinking
        else:
            thinking = tuple(tokens[max(i - 2, 0) : i + 1]) == CHANNEL
    assert budget is None or count <= budget
