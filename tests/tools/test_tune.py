"""Constants are chosen by times, and each load can be run."""

from dataclasses import replace

import pytest

from metal.host import compiler_available, installed
from tools.bench import tune_loads
from tools.bench.tune import constants
from tools.bench.tuning import (
    TUNABLE,
    Choice,
    Formula,
    Load,
    Way,
    seconds_in_turns,
    tune,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.specs import AttentionShape

TINY = tune_loads.Sizes(AttentionShape(2, 1, 16, 16, mx.bfloat16), 16)

# As much smaller as the loads, so that each has forms to choose from.
START = replace(
    profile(), decode_fill=256, min_split_context=64, min_split_keys=32, few_keys=16,
    prefix_fill=8, min_prefix_split_keys=32, argmax_long=1024,
)  # fmt: skip


def choice(threshold):
    """`rope_many_rows`, where form True is best from `threshold` rows on; and such a timer."""

    def load(rows):
        # The rows take the place of the call, for the timer.
        return Load(lambda: rows >= profile().rope_many_rows, lambda form: Way(form, rows, None))

    def timer(ways):
        return [1.0 if way.form == (way.call >= threshold) else 2.0 for way in ways]

    loads = [load(rows) for rows in (32, 64, 128, 256, 512)]
    return Choice("rope_many_rows", "", (64, 128, 256, 512), lambda: loads), timer


def within_limits(name, value):
    low, high = TUNABLE[name]
    return low <= value <= high


@pytest.mark.parametrize("threshold", [64, 128, 512])
def test_the_cheapest_candidate_is_chosen(threshold):
    constant, timer = choice(threshold)
    (found,) = tune([constant], profile(), timer=timer)
    assert (found.before, found.value) == (256, threshold)


def test_noise_changes_nothing():
    constant, _ = choice(64)
    noise = iter([1.0, 1.01, 1.02, 0.99] * 10)
    (found,) = tune([constant], profile(), timer=lambda ways: [next(noise) for _ in ways])
    assert found.value == profile().rope_many_rows


def test_of_candidates_alike_the_nearest_to_the_present_value_is_chosen():
    constant, timer = choice(128)
    wider = replace(constant, candidates=(64, 80, 100, 128, 256, 512))  # 80 to 128 serve alike
    for present, nearest in (512, 128), (64, 80):
        start = replace(profile(), rope_many_rows=present)
        (found,) = tune([wider], start, timer=timer)
        assert found.value == nearest


def test_a_later_constant_is_measured_with_the_earlier_ones():
    seen = []

    def compute(_):
        seen.append((profile().rope_many_rows, profile().decode_fill))
        return 99.0

    constant, timer = choice(64)
    before = profile()
    later = [Formula("decode_fill", "", compute), Formula("few_keys", "", compute)]
    found = tune([constant, *later], before, timer=timer)
    assert seen == [(64, before.decode_fill), (64, 99)]
    assert [m.value for m in found] == [64, 99, 99]
    assert profile() == before


def test_a_formula_stays_within_the_limits():
    for value in (-1.0, 1e30):
        (found,) = tune([Formula("key_cost", "", lambda _, v=value: v)], profile())
        assert found.value in TUNABLE["key_cost"]


def test_a_constant_that_cannot_be_measured_stays_and_says_why():
    def fail(_):
        raise RuntimeError("no pipeline")

    told = []
    (found,) = tune([Formula("key_cost", "", fail)], profile(), told.append)
    assert (found.value, found.failure) == (profile().key_cost, "no pipeline")
    assert told == ["key_cost"]


def test_every_candidate_is_within_the_limits():
    for constant in constants(TINY):
        assert constant.name in TUNABLE
        for value in getattr(constant, "candidates", ()):
            assert within_limits(constant.name, value)


@pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")
def test_each_load_runs_in_each_form():
    """Small, on the CPU host: with equal times nothing changes but what a formula computes."""
    current, timed = [], set()

    def timer(ways):
        for way in ways:
            got = way.call(way.x)
            mx.eval(got)
            assert got.shape == way.x.shape, "the result is the next call's input"
            timed.add(current[-1])
        return [1.0] * len(ways)

    with installed():
        found = tune(constants(TINY), START, current.append, timer)
    assert [m.failure for m in found] == [None] * len(found)
    assert all(within_limits(m.name, m.value) for m in found)
    changed = {m.name for m in found if m.value != m.before}
    assert changed <= {"prefix_row_cost", "sdpa_call_cost", "key_cost"}
    assert timed == set(current)


def test_times_are_those_of_one_call():
    x = mx.zeros(8)
    times = seconds_in_turns([Way(1, lambda a: a + 1, x), Way(2, lambda a: a + 1, x, False)])
    assert len(times) == 2
    assert all(0 < t < 1 for t in times)
