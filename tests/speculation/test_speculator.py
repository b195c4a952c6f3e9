"""Drafts only where the expected tokens a second rise."""

import numpy as np
import pytest

from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput, Segment
from vllm_metal_lite.speculation.speculator import MAX_DRAFT, Speculator
from vllm_metal_lite.speculation.speculator import _Record as Record


def speculator(count=1, length=100):
    """For `count` requests whose tokens repeat without an end."""
    requests = [Request(str(i), list(range(10)), 50) for i in range(count)]
    found = Speculator(lambda request: np.arange(length, dtype=np.int32) % 10)
    return found, requests


def tell(speculator, requests, rows, seconds, times=6, drafts=0, accepted=0):
    """Note steps of these requests, each with as many drafts."""
    for _ in range(times):
        for request in requests:
            speculator._history(request).proposed = [1] * drafts
        segments = [
            Segment(request, 10, 1 + drafts, (), draft_token_ids=[1] * drafts)
            for request in requests
        ]
        out = SchedulerOutput(segments, 0 if drafts else len(segments), rows)
        speculator.record(out, [accepted] * len(requests) if drafts else [], seconds)


def lengths(speculator, requests, most=99):
    return [len(draft) for draft in speculator.propose([(r, most) for r in requests])]


def test_repetition_is_drafted_and_the_rest_is_not():
    drafting, (request,) = speculator()
    assert lengths(drafting, [request]) == [MAX_DRAFT]
    assert drafting.wants([request])
    assert lengths(drafting, [request], most=5) == [5]
    drafting._tokens_of = lambda request: np.arange(100, dtype=np.int32)
    assert lengths(drafting, [request]) == [0]
    assert not drafting.wants([request])


def test_dear_rows_are_not_taken():
    """Eight times the rows take eight times as long, as on a CPU: nothing is gained."""
    drafting, requests = speculator(4)
    tell(drafting, requests, 4, 1.0)
    for drafts in (3, 7, 15, 31):
        tell(drafting, requests, 4 * (1 + drafts), 1.0 + drafts, drafts=drafts, accepted=drafts)
    assert lengths(drafting, requests) == [0] * 4
    assert not drafting.wants(requests)


def test_the_best_length_is_taken():
    drafting, requests = speculator(1)
    tell(drafting, requests, 1, 1.0)
    for drafts, seconds in ((3, 1.1), (7, 1.2), (15, 9.0), (31, 20.0)):
        tell(drafting, requests, 1 + drafts, seconds, drafts=drafts, accepted=drafts)
    assert lengths(drafting, requests) == [7]


def test_wrong_drafts_end_and_are_tried_again():
    drafting, requests = speculator(1)
    tell(drafting, requests, 1, 1.0)
    for drafts in (3, 7, 15, 31):
        tell(drafting, requests, 1 + drafts, 1.5, times=7, drafts=drafts, accepted=0)
    assert lengths(drafting, requests) == [0]
    steps = 0
    while lengths(drafting, requests) == [0]:
        tell(drafting, requests, 1, 1.0, times=1)
        steps += 1
    assert 5 < steps < 300


@pytest.mark.parametrize(("seconds", "drafts"), [(9.0, 31), (40.0, 0)])
def test_plain_steps_are_measured_too_where_everything_repeats(seconds, drafts):
    """Otherwise steps with drafts, however slow, would never be compared."""
    drafting, requests = speculator(4)
    assert lengths(drafting, requests) == [MAX_DRAFT] * 4
    tell(drafting, requests, 128, seconds, drafts=31, accepted=31)
    assert lengths(drafting, requests) == [0] * 4
    assert not drafting.wants(requests)
    tell(drafting, requests, 4, 1.0)
    assert lengths(drafting, requests) == [drafts] * 4


def test_what_was_slow_once_is_tried_again():
    """The first times of a width may be those of a busy machine, or of a compiler."""
    drafting, (request,) = speculator()
    tell(drafting, [request], 1, 1.0)
    for drafts in (3, 7, 15, 31):
        tell(drafting, [request], 1 + drafts, 50.0, drafts=drafts, accepted=drafts)
    assert lengths(drafting, [request]) == [0]
    tell(drafting, [request], 1, 1.0, times=30_000)
    assert lengths(drafting, [request]) != [0]


def test_a_model_drafts_what_lookup_does_not_find():
    asked = []

    def draft(wanted):
        asked.append([most for _, most in wanted])
        return [[7] * most for _, most in wanted]

    requests = [Request(str(i), list(range(10)), 50) for i in range(2)]
    texts = {requests[0]: np.arange(100, dtype=np.int32) % 10, requests[1]: np.arange(100)}
    drafting = Speculator(texts.__getitem__, draft, 3)
    assert [len(d) for d in drafting.propose([(r, 9) for r in requests])] == [9, 3]
    assert asked == [[3]]
    for record in (r for _ in range(20) for r in drafting._history(requests[1]).records):
        record.record(0, 3)
    assert [len(d) for d in drafting.propose([(requests[1], 9)])] == [0]


def test_steps_with_prompts_say_nothing_about_pace():
    drafting, (request,) = speculator()
    out = SchedulerOutput([Segment(request, 0, 1, ()), Segment(request, 0, 9, ())], 1, 10)
    drafting.record(out, [], 5.0)
    assert drafting.pace._times == {}


def test_nothing_is_kept_of_a_request_that_ended():
    drafting, requests = speculator(2)
    tell(drafting, requests, 8, 1.0, drafts=3, accepted=3)
    assert set(drafting._histories) == set(requests)
    requests.clear()
    assert not drafting._histories


def test_tokens_that_a_constraint_puts_behind_a_draft_are_not_its_merit():
    drafting, (request,) = speculator()
    (draft,) = drafting.propose([(request, 3)])
    before = drafting._history(request).records[0].rate
    segment = Segment(request, 10, 9, (), draft_token_ids=[*draft, 7, 7, 7, 7, 7])
    drafting.record(SchedulerOutput([segment], 0, 9), [1], None)
    assert drafting._history(request).records[0].rate < before
    drafting.record(SchedulerOutput([segment], 0, 9), [8], None)
    accepted = drafting._history(request).records[0].accepted
    assert accepted == pytest.approx((4 * 0.95 + 1) * 0.95 + 3)


def test_drafts_that_always_come_true_leave_a_rate_below_one():
    record = Record()
    for _ in range(1000):
        record.record(31, 31)
    assert 30.9 < record.expected(31) < 31


def test_text_that_repeats_nothing_is_looked_at_in_each_fourth_step():
    drafting, (request,) = speculator()
    looked_up = []
    drafting._tokens_of = lambda request: looked_up.append(1) or np.arange(100, dtype=np.int32)
    for _ in range(16 + 40):
        assert not drafting.wants([request])
    assert len(looked_up) == 16 + 10
    drafting._tokens_of = lambda request: np.arange(100, dtype=np.int32) % 10
    assert [drafting.wants([request]) for _ in range(4)].count(True) > 0
    assert drafting.wants([request])


def test_a_new_request_starts_with_the_share_of_all():
    """A drafter that was wrong for others is not tried anew for each request."""
    tokens = np.arange(40, dtype=np.int32)
    told = Speculator(lambda request: tokens, lambda wanted: [[7] * n for _, n in wanted], 3)
    new = Request("new", [1], 99)
    assert told.num_ahead([new]) == 3
    for i in range(30):
        request = Request(str(i), [1], 99)
        history = told._history(request)
        history.proposed, history.of_last = [7] * 3, history.records[1]
        out = SchedulerOutput([Segment(request, 40, 4, (), draft_token_ids=[7] * 3)])
        told.record(out, [0], None)
    assert told.num_ahead([Request("newer", [1], 99)]) == 0


def test_the_model_drafts_ahead_for_no_request_whose_drafts_are_looked_up():
    told = Speculator(lambda request: np.array([*range(20)] * 3), lambda wanted: [], 3)
    request, other = Request("0", [1], 99), Request("1", [1], 99)
    assert told.num_ahead([request]) == 3
    assert len(told.propose([(request, 99)])[0]) > 3
    assert told.num_ahead([request]) == told.num_ahead([other, request]) == 0
