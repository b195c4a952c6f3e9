"""The rules of recurrent states' slots, one small example each."""

import pytest

from tests.support.engine.fake_engine import fake_config
from tests.support.engine.pool_accounts import check_slots
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT
from vllm_metal_lite.scheduler import following
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput
from vllm_metal_lite.scheduler.state_slots import StateSlots

SIZE = 4


def make(num_slots: int, seats: int = 2, budget: int = 64) -> Scheduler:
    config = fake_config(
        SIZE, max_num_seqs=seats, max_num_batched_tokens=budget, enable_prefix_caching=True
    )
    return Scheduler(config, [KVGroup(num_blocks=64)], 128, num_state_slots=num_slots)


def add(
    scheduler: Scheduler, name: str, prompt: list[int], max_tokens: int = 20, **more
) -> Request:
    request = Request(name, prompt, max_tokens, **more)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, token: int = 7) -> SchedulerOutput:
    out = scheduler.schedule()
    scheduler.advance(out)
    scheduler.update(out, [token] * len(out.terminal))
    return out


def states(scheduler: Scheduler) -> StateSlots:
    assert scheduler.kv.states is not None
    return scheduler.kv.states


def hit(scheduler: Scheduler, prompt: list[int]) -> int:
    """Tokens that a prompt would find."""
    return scheduler.kv.find_prefix(Request("asks", prompt, 1)).num_tokens


def test_a_checkpoint_that_a_step_reads_is_not_given_out_in_that_step():
    slots = StateSlots(3, 2)
    donor, heir = Request("donor", [1], 1), Request("heir", [1], 1)
    slots.admit(donor, None)
    slot = donor.state.final
    slots.name(slot, b"prefix")
    slots.free(donor)
    slots.begin_step()
    slots.admit(heir, slots.pool.lookup(b"prefix"))
    assert heir.state.initial == slot != heir.state.final
    slots.admit(donor, None)
    assert slot not in (donor.state.final, slots.reserve())
    slots.begin_step()
    check_slots(slots, [donor, heir])


def test_a_decode_in_the_middle_of_a_block_stays_in_its_slot():
    scheduler = make(8)
    request = add(scheduler, "a", list(range(6)))
    step(scheduler)
    first = request.state.final
    assert request.state.checkpoints == [(4, states(scheduler).pool.lookup(request.block_names[0]))]
    out = step(scheduler)
    assert (out.segments[0].state.initial, out.segments[0].state.final) == (first, first)


def test_an_answers_last_block_replaces_the_one_before_and_the_prompts_stays():
    scheduler = make(8)
    request = add(scheduler, "a", list(range(6)))
    for _ in range(8):  # the prompt, then tokens 6 .. 12: blocks end at 8 and 12
        step(scheduler)
    known = [states(scheduler).pool.lookup(name) is not None for name in request.block_names]
    assert known == [True, False, True]
    assert hit(scheduler, [*request.token_ids, 1]) == 12


def test_an_answer_does_not_forget_the_end_of_another_that_was_alike():
    scheduler = make(8)
    first = add(scheduler, "a", list(range(6)))
    second = add(scheduler, "b", list(range(6)))
    while first.num_computed_tokens < 8 or second.num_computed_tokens < 8:
        step(scheduler)
    turn = [*first.token_ids[:8], 1, 2]
    scheduler.finish(first)
    assert hit(scheduler, turn) == 8
    while second.num_computed_tokens < 12:
        step(scheduler)
    assert hit(scheduler, turn) == 8


def test_with_a_slot_for_each_seat_a_hit_takes_the_checkpoint_over():
    scheduler = make(1, seats=1)
    request = _served(scheduler, "a", list(range(6)), 3)
    scheduler.finish(request)  # its one slot holds the state after 8 tokens
    add(scheduler, "b", [*request.token_ids[:8], 50, 51])
    segment = step(scheduler).segments[0]
    assert segment.num_computed == 8
    assert segment.state.initial == segment.state.final != EMPTY_SLOT


def _served(scheduler: Scheduler, name: str, prompt: list[int], budget: int) -> Request:
    request = add(scheduler, name, prompt)
    for _ in range(budget):
        step(scheduler)
    return request


def test_a_prompt_that_leaves_a_known_one_keeps_the_state_of_the_junction():
    scheduler = make(8)
    shared = list(range(16))
    scheduler.finish(_served(scheduler, "a", [*shared, *range(50, 59)], 1))
    second = add(scheduler, "b", [*shared, *range(70, 79)])
    scheduler_out = step(scheduler)
    assert scheduler_out.segments[0].num_computed == 0
    assert scheduler.prefix_lost_tokens == 16
    assert 16 in [position for position, _ in second.state.checkpoints]
    assert hit(scheduler, [*shared, 90, 91]) == 16


@pytest.mark.parametrize("end", ["continues", "is aborted", "fails"])
def test_the_second_of_two_prompts_behind_one_prefix_waits_for_the_first(end, monkeypatch):
    monkeypatch.setattr(following, "WORTH_WAITING", 8)
    scheduler = make(8)
    shared = list(range(32))
    first = add(scheduler, "a", [*shared, 50, 51])
    second = add(scheduler, "b", [*shared, 60, 61])
    out = scheduler.schedule()
    assert [s.request for s in out.segments] == [first]
    if end == "fails":
        scheduler.rollback(out)
        assert hit(scheduler, second.token_ids) == 0
        step(scheduler)
    else:
        scheduler.advance(out)
        if end == "is aborted":
            scheduler.finish(first)
        scheduler.update(out, [7])
    started = {s.request: s.num_computed for s in step(scheduler).segments}
    assert started[second] == 32


@pytest.mark.parametrize("num_blocks", [5, 6])
def test_a_windows_blocks_before_a_checkpoint_outlive_those_in_the_middle(num_blocks):
    config = fake_config(
        SIZE, max_num_seqs=1, max_num_batched_tokens=SIZE, enable_prefix_caching=True
    )
    groups = [KVGroup(num_blocks=64), KVGroup(window=SIZE + 1, num_blocks=num_blocks)]
    scheduler = Scheduler(config, groups, 128)
    prompt = list(range(40))
    request = add(scheduler, "a", prompt, max_tokens=4, checkpoint_positions=(8,))
    while request.num_computed_tokens < 40:
        step(scheduler)
    scheduler.finish(request)
    assert hit(scheduler, [*prompt[:8], 90, 91]) == 8


def test_a_reset_forgets_what_the_step_in_flight_leaves():
    """States get their names only once their step is in flight."""
    scheduler, prompt = make(8), list(range(9))
    first = add(scheduler, "first", prompt)
    aborted = add(scheduler, "aborted", [9, *prompt])
    out = scheduler.schedule()
    scheduler.finish(aborted)
    scheduler.reset_prefix_cache()
    scheduler.advance(out)
    scheduler.update(out, [7, 7])
    assert states(scheduler).num_taken == 0
    # Nor does it leave any later, even behind blocks that another request computes.
    add(scheduler, "second", prompt, max_tokens=1)
    step(scheduler)
    step(scheduler)
    step(scheduler)
    assert first.num_computed_tokens == 12
    assert hit(scheduler, first.token_ids) == hit(scheduler, [*prompt, 7]) == 8


def test_a_request_that_starts_again_after_a_reset_leaves_checkpoints():
    scheduler, prompt = make(8), list(range(9))
    add(scheduler, "first", prompt)
    out = scheduler.schedule()
    scheduler.reset_prefix_cache()
    scheduler.rollback(out)
    step(scheduler)
    assert hit(scheduler, prompt) == 8


SYSTEM = list(range(1000, 1016))


class Conversation:
    """Turns as a chat sends them: the system prompt's end and the last message's end are named."""

    def __init__(self, scheduler: Scheduler, number: int) -> None:
        self.scheduler, self.number, self.num_turns = scheduler, number, 0
        self.tokens = list(SYSTEM)

    def turn(self) -> int:
        """Its next question, and an answer.  Returns the tokens that were not cached."""
        self.num_turns += 1
        base = 2000 + 1000 * self.number + 20 * self.num_turns
        self.tokens += range(base, base + 9)
        named = (len(SYSTEM), len(self.tokens))
        how = {"max_tokens": 6, "checkpoint_positions": named}
        request = add(self.scheduler, f"{self.number}.{self.num_turns}", [*self.tokens, 1], **how)
        while self.scheduler._requests:
            out = step(self.scheduler)
            for ended in [r for r in out.terminal if r.num_tokens == r.max_length]:
                self.scheduler.finish(ended)
        self.tokens += range(base + 9, base + 13)  # the client's own words for the answer
        return request.num_prompt_tokens - request.num_cached_tokens


def tight(slots: int) -> Scheduler:
    """One seat, and enough checkpoints that the test fails without the rule that it is about."""
    return make(1 + slots, seats=1)


def test_a_conversation_that_rests_keeps_its_checkpoints_while_another_goes_on():
    scheduler = tight(7)
    busy, resting = Conversation(scheduler, 0), Conversation(scheduler, 1)
    for conversation in (busy, resting):
        conversation.turn()
    for _ in range(5):
        assert busy.turn() < 20
    assert resting.turn() < 20


def test_a_system_prompt_stays_as_long_as_one_of_its_conversations_goes_on():
    scheduler = tight(8)
    conversation = Conversation(scheduler, 0)
    conversation.turn()
    for n in range(6):
        stranger = Conversation(scheduler, 20 + n)
        stranger.tokens = list(range(5000 + 100 * n, 5016 + 100 * n))
        stranger.turn()
        assert conversation.turn() < 20
    assert Conversation(scheduler, 1).turn() < 20


def test_a_side_question_does_not_take_the_place_away_where_it_began():
    scheduler = tight(5)
    main = Conversation(scheduler, 0)
    for _ in range(2):
        main.turn()
    side = Conversation(scheduler, 1)
    side.tokens = main.tokens[:-4]  # without the last answer
    side.turn()
    assert main.turn() < 20


def test_conversations_that_begin_alike_do_not_leave_each_others_checkpoints():
    scheduler = tight(6)
    alike = [Conversation(scheduler, 0) for _ in range(3)]
    for conversation in alike:
        conversation.turn()
    for n, conversation in enumerate(alike):
        conversation.number = 10 + n
        for _ in range(3):
            assert conversation.turn() < 20


def test_a_junction_is_not_left_behind_by_the_prompt_that_found_it():
    scheduler = tight(5)
    names = iter("abcdefgh")

    def ask(prompt: list[int]) -> Request:
        request = _served(scheduler, next(names), prompt, 4)
        scheduler.finish(request)
        return request

    ask([*SYSTEM, *range(9)])
    second = ask([*SYSTEM, *range(20, 29)])  # leaves the junction
    for n in range(3):
        second = ask([*second.token_ids, *range(30 + 10 * n, 39 + 10 * n)])
    assert hit(scheduler, [*SYSTEM, *range(70, 79)]) == len(SYSTEM)
