"""Times of steps by their width."""

import math

import pytest

from vllm_metal_lite.speculation.pace import PLAIN, Pace, width


def test_a_first_step_that_compiles_does_not_count():
    pace = Pace()
    pace.record(1, PLAIN, 1.0)
    for seconds in (30.0, 10.0, 5.0, 1.3, 1.2):
        pace.record(8, 0, seconds)
    for _ in range(5):
        pace.record(1, PLAIN, 1.0)
    assert pace.ratio(1, 8, 0) == pytest.approx(1.25)  # not known yet
    pace.record(8, 0, 1.3)
    assert pace.ratio(1, 8, 0) == pytest.approx(1.3 * 1.001)  # plain steps are one step ago
    assert [width(n) for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 16]


def test_a_time_that_is_too_short_is_no_measure():
    pace = Pace()
    for _ in range(6):
        pace.record(4, 3, 2.0)
    for seconds in (0.4, 1.6, *[1.0] * 8, 0.4, 1.6, *[1.0] * 8):
        pace.record(1, PLAIN, seconds)
        known = len(pace._times[PLAIN, 1]) >= 6
        assert not known or pace.ratio(1, 4, 3) == pytest.approx(2, rel=0.03)


def test_widths_are_tried_within_a_tenth_of_the_time():
    """The first step of each width compiles for eight seconds, as on CUDA."""
    pace, seen = Pace(), set()

    def step(rows, drafted):
        pace.record(rows, drafted, 0.01 if (drafted, width(rows)) in seen else 8.0)
        seen.add((drafted, width(rows)))

    for _ in range(6):
        step(8, PLAIN)
    assert pace.ratio(8, 256, 0) == pytest.approx(1.25)
    for _ in range(6):
        step(256, 0)  # a width that was begun is finished
        assert pace.ratio(8, 256, 0) < 2
    assert pace.ratio(8, 128, 0) == pace.ratio(8, 64, 0) == math.inf
    while math.isinf(pace.ratio(8, 128, 0)):
        step(8, PLAIN)
    assert 80 < pace._seconds < 81


def test_plain_steps_are_measured_anew():
    """While drafts pay, no plain step runs, and the last ones may have run on a busy machine."""
    pace = Pace()
    for _ in range(6):
        pace.record(1, PLAIN, 9.0)
        pace.record(4, 3, 2.0)
    assert pace.ratio(1, 4, 3) < 1
    while not pace.lacks_plain:
        pace.record(4, 3, 2.0)
    assert pace.ratio(1, 4, 3) == math.inf
    for _ in range(6):
        assert pace.lacks_plain
        pace.record(1, PLAIN, 1.0)
    assert not pace.lacks_plain
    assert pace.ratio(1, 4, 3) == pytest.approx(2, rel=0.01)
