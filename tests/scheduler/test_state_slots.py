"""The rules of recurrent states' slots, one small example each."""

import pytest

from tests.support.engine.fake_engine import FakeEngine, fake_config
from tests.support.engine.pool_accounts import check_slots
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.state_slots import StateSlots

SIZE = 4


def make(num_slots: int, seats: int = 2, budget: int = 64, groups=64) -> FakeEngine:
    how = {"max_num_seqs": seats, "max_num_batched_tokens": budget}
    return FakeEngine(fake_config(SIZE, **how), groups, 128, num_state_slots=num_slots)


def hit(engine: FakeEngine, prompt: list[int]) -> int:
    """Tokens that a prompt would find."""
    return engine.scheduler.kv.find_prefix(Request("asks", prompt, 1)).num_tokens


def knows(engine: FakeEngine, name: bytes) -> int | None:
    """The slot of a checkpoint."""
    return engine.scheduler.kv.states.lookup(name)


def served(engine: FakeEngine, name: str, prompt: list[int], num_steps: int) -> Request:
    """A request after some steps."""
    request = engine.add(prompt, 20, name)
    for _ in range(num_steps):
        engine.step()
    return request


def test_a_checkpoint_that_a_step_reads_is_not_given_out_in_that_step():
    slots = StateSlots(3, 2)
    donor, heir = Request("donor", [1], 1), Request("heir", [1], 1)
    slots.admit(donor, None)
    slot = slots.running[donor].final
    slots.name(slot, b"prefix")
    slots.leave(donor)
    slots.begin_step()
    slots.admit(heir, slots.lookup(b"prefix"))
    assert slots.running[heir].initial == slot != slots.running[heir].final
    slots.admit(donor, None)
    assert slot not in (slots.running[donor].final, slots.take())
    slots.begin_step()
    check_slots(slots)


def test_a_decode_in_the_middle_of_a_block_stays_in_its_slot():
    engine = make(8)
    request = engine.add(list(range(6)), 20, "a")
    engine.step()
    state = engine.steps[0].segments[0].state
    assert state.checkpoints == [(4, knows(engine, request.block_names[0]))]
    out = engine.step()
    assert (out.segments[0].state.initial, out.segments[0].state.final) == (state.final,) * 2


def test_an_answers_last_block_replaces_the_one_before_and_the_prompts_stays():
    engine = make(8)
    request = engine.add(list(range(6)), 20, "a")
    for _ in range(8):  # the prompt, then tokens 6 .. 12: blocks end at 8 and 12
        engine.step()
    known = [knows(engine, name) is not None for name in request.block_names]
    assert known == [True, False, True]
    assert hit(engine, [*request.token_ids, 1]) == 12


def test_an_answer_does_not_forget_the_end_of_another_that_was_alike():
    engine = make(8)
    first = engine.add(list(range(6)), 20, "a")
    second = engine.add(list(range(6)), 20, "b")
    while first.num_computed_tokens < 8 or second.num_computed_tokens < 8:
        engine.step()
    turn = [*first.token_ids[:8], 1, 2]
    engine.abort(first.request_id)
    assert hit(engine, turn) == 8
    while second.num_computed_tokens < 12:
        engine.step()
    assert hit(engine, turn) == 8


def test_with_a_slot_for_each_seat_a_hit_takes_the_checkpoint_over():
    engine = make(1, seats=1)
    request = served(engine, "a", list(range(6)), 3)
    engine.abort(request.request_id)  # its one slot holds the state after 8 tokens
    engine.add([*request.token_ids[:8], 50, 51], 20, "b")
    segment = engine.step().segments[0]
    assert segment.num_computed == 8
    assert segment.state.initial == segment.state.final != EMPTY_SLOT


def test_a_prompt_that_leaves_a_known_one_keeps_the_state_of_the_junction():
    engine = make(8)
    shared = list(range(16))
    served(engine, "a", [*shared, *range(50, 59)], 1)
    engine.abort("a")
    engine.add([*shared, *range(70, 79)], 20, "b")
    assert engine.step().segments[0].num_computed == 0
    assert engine.scheduler.counts.prefix_cache_lost_tokens == 16
    assert 16 in [position for position, _ in engine.steps[-1].segments[0].state.checkpoints]
    assert hit(engine, [*shared, 90, 91]) == 16


@pytest.mark.parametrize("end", ["continues", "is aborted", "fails"])
def test_the_second_of_two_prompts_behind_one_prefix_waits_for_the_first(end):
    engine = make(8)
    shared = list(range(64))
    first = engine.add([*shared, 50, 51], 20, "a")
    second = engine.add([*shared, 60, 61], 20, "b")
    engine.in_flight.launch(engine.scheduler.schedule())
    assert [s.request for s in engine.in_flight.outputs[0].segments] == [first]
    if end == "fails":
        engine.in_flight.rollback()
        assert hit(engine, second.token_ids) == 0
    elif end == "is aborted":
        engine.abort("a")
    engine.step()
    started = {s.request: s.num_computed for s in engine.step().segments}
    assert started[second] == 64


@pytest.mark.parametrize("num_blocks", [5, 6])
def test_a_windows_blocks_before_a_checkpoint_outlive_those_in_the_middle(num_blocks):
    groups = [KVGroup(num_blocks=64), KVGroup(window=SIZE + 1, num_blocks=num_blocks)]
    engine, prompt = make(0, seats=1, budget=SIZE, groups=groups), list(range(40))
    request = engine.add(prompt, 4, checkpoints=(8,))
    while request.num_computed_tokens < 40:
        engine.step()
    engine.abort(request.request_id)
    assert hit(engine, [*prompt[:8], 90, 91]) == 8


def test_a_reset_forgets_what_the_step_in_flight_leaves():
    """States get their names only once their step is in flight."""
    engine, prompt = make(8), list(range(9))
    first = engine.add(prompt, 20, "first")
    engine.add([9, *prompt], 20, "aborted")
    engine.in_flight.launch(engine.scheduler.schedule())
    engine.abort("aborted")
    engine.scheduler.kv.reset()
    engine.step()
    assert engine.scheduler.kv.states.num_taken == 0
    # Nor does it leave any later, even behind blocks that another request computes.
    engine.add(prompt, 1, "second")
    engine.step()
    engine.step()
    engine.step()
    assert first.num_computed_tokens == 12
    assert hit(engine, first.token_ids) == hit(engine, [*prompt, 7]) == 8


def test_a_request_that_starts_again_after_a_reset_leaves_checkpoints():
    engine, prompt = make(8), list(range(9))
    engine.add(prompt, 20)
    engine.in_flight.launch(engine.scheduler.schedule())
    engine.scheduler.kv.reset()
    engine.in_flight.rollback()
    engine.step()
    assert hit(engine, prompt) == 8


SYSTEM = list(range(1000, 1016))


class Conversation:
    """Turns as a chat sends them: the system prompt's end and the last message's end are named."""

    def __init__(self, engine: FakeEngine, number: int) -> None:
        self.engine, self.number, self.num_turns = engine, number, 0
        self.tokens = list(SYSTEM)

    def turn(self) -> int:
        """Its next question, and an answer.  Returns the tokens that were not cached."""
        self.num_turns += 1
        base = 1100 + 110 * self.number + 13 * self.num_turns
        self.tokens += range(base, base + 9)
        name, named = f"{self.number}.{self.num_turns}", (len(SYSTEM), len(self.tokens))
        request = self.engine.add([*self.tokens, 1], 6, name, checkpoints=named)
        self.engine.run()
        self.tokens += range(base + 9, base + 13)  # the client's own words for the answer
        return request.num_prompt_tokens - request.num_cached_tokens


def tight(slots: int) -> FakeEngine:
    """One seat, and so few checkpoints that the test fails if all are worth the same."""
    return make(1 + slots, seats=1)


def test_a_conversation_that_rests_keeps_its_checkpoints_while_another_goes_on():
    engine = tight(9)
    busy, resting = Conversation(engine, 0), Conversation(engine, 1)
    for conversation in (busy, resting):
        conversation.turn()
    for _ in range(5):
        assert busy.turn() < 20
    assert resting.turn() < 20


def test_a_system_prompt_stays_as_long_as_one_of_its_conversations_goes_on():
    engine = tight(5)
    conversation = Conversation(engine, 0)
    conversation.turn()
    for n in range(6):
        stranger = Conversation(engine, 20 + n)
        stranger.tokens = list(range(100 * n, 100 * n + 16))
        stranger.turn()
        assert conversation.turn() < 20
    assert Conversation(engine, 1).turn() < 20


def test_a_second_prompt_makes_a_checkpoint_a_fork_that_stays():
    """One prompt that continues from a checkpoint is probably its conversation's next turn."""
    for num_prompts, cached in ((1, 0), (2, 32)):
        engine = tight(4)
        for n in range(1 + num_prompts):  # the first prompt leaves the checkpoint
            engine.add([*range(33), *range(50 * n, 50 * n + 20 * (n > 0))], 1, f"r{n}")
            engine.run()
        for n in range(3):
            engine.add([*range(700 + 50 * n, 709 + 50 * n)], 1, f"other{n}")
            engine.run()
        assert hit(engine, [*range(33), 90, 91]) == cached


def test_prompts_behind_many_that_follow_wait_too():
    engine = make(160, seats=80, budget=512, groups=4096)
    for number in range(70):
        engine.add([*range(100), number], 2, f"r{number}")
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["r0"]
    engine.step()
    assert len(engine.scheduler.running) > 60
