"""Where checkpoints are left and which are evicted: what is computed again in long conversations.

The scheduler runs without a model, since these prompts are long.
"""

import random

import numpy as np
import pytest

from tests.support.engine.fake_engine import fake_config
from vllm_metal_lite.scheduler.checkpoints import MAX_NAMED, inner_starts, likely_starts
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.request import Request, RequestStatus
from vllm_metal_lite.scheduler.scheduler import Scheduler


class Host:
    """A scheduler whose steps sample random tokens."""

    def __init__(self, num_seats: int, num_checkpoints: int, seed: int = 0) -> None:
        config = fake_config(16, max_num_seqs=num_seats, max_num_batched_tokens=2048)
        slots = num_seats + num_checkpoints
        self.scheduler = Scheduler(config, [KVGroup(num_blocks=100_000)], 1 << 20, slots)
        self.random, self.num_requests = random.Random(seed), 0

    def text(self, length: int) -> list[int]:
        return [self.random.randrange(1000, 50_000) for _ in range(length)]

    def add(self, prompt: list[int], max_tokens: int, named: tuple[int, ...]) -> Request:
        name, self.num_requests = str(self.num_requests), self.num_requests + 1
        order = (self.num_requests,)
        request = Request(name, prompt, max_tokens, order, checkpoint_positions=named)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        out = self.scheduler.schedule()
        ended = self.scheduler.advance(out)
        self.scheduler.update(out, self.text(len(out.terminal)), {})
        for request in ended:
            self.scheduler.finish(request)

    def ask(self, prompt: list[int], max_tokens: int, named: tuple[int, ...] = ()) -> Request:
        request = self.add(prompt, max_tokens, named)
        while request.status is not RequestStatus.FINISHED:
            self.step()
        return request


class Chat:
    """A conversation whose prompts repeat the answers in other tokens than the model generated."""

    def __init__(self, host: Host, system: list[int], questions: list[int]) -> None:
        self.host, self.questions = host, questions
        self.tokens, self.system_end = [1, *system, 2], len(system) + 2
        self.request: Request | None = None

    def ask(self, max_tokens: int) -> bool:
        """Send the next question; False after the last one."""
        if not self.questions:
            return False
        before = len(self.tokens)
        self.tokens += [3, *self.host.text(self.questions.pop(0)), 2]
        named = self.system_end, before, len(self.tokens) - 1
        self.request = self.host.add([*self.tokens, 4], max_tokens, named)
        self.tokens += [4, *self.host.text(max_tokens), 2]
        return True


@pytest.mark.parametrize("seed", range(3))
def test_eight_sessions_compute_little_again(seed):
    """The load `sessions` of tools/bench/server.py, at scale 0.15, with 8 sessions of 6 turns.

    By age alone 17 % of the prompt tokens are computed again.
    """
    host, sizes = Host(8, 32, seed), np.random.default_rng(seed)
    system = host.text(3000)
    chats = []
    for _ in range(8):
        questions = np.clip(sizes.lognormal(np.log(600), 0.7, 6), 200, 2000)
        questions[0] = 5000
        chats.append(Chat(host, system, (questions * 0.15).astype(int).tolist()))
    running = [chat for chat in chats if chat.ask(22)]
    num_tokens = sum(chat.request.num_prompt_tokens for chat in running)
    while running:
        host.step()
        for chat in running[:]:
            if chat.request.status is RequestStatus.FINISHED:
                if chat.ask(22):
                    num_tokens += chat.request.num_prompt_tokens
                else:
                    running.remove(chat)
    assert num_tokens > 190_000
    assert host.scheduler.counts.prefix_cache_lost_tokens < 0.03 * num_tokens


@pytest.mark.parametrize("others", [0, 5])
@pytest.mark.parametrize("rewrites", [False, True])
@pytest.mark.parametrize(("seats", "checkpoints"), [(1, 8), (1, 15), (4, 60)])
def test_a_third_session_finds_what_the_second_one_shared(seats, checkpoints, rewrites, others):
    """A coding agent's prompts begin with 8,135 tokens alike; then its folder follows, within the
    system message, so no caller names that position.

    others: prompts of other clients between two turns.
    """
    host = Host(seats, checkpoints)
    alike, cached = host.text(8135), []
    for _ in range(3):
        system = [*alike, *host.text(60)]
        tokens = [*system, *host.text(200)]
        question = len(tokens)
        for turn in range(12):
            if turn:
                tokens += host.text(host.random.choice([30, 80, 200, 600, 1500]))
            named = len(system), question, len(tokens)
            request = host.ask([*tokens, 4], 60, named)
            tokens = [*tokens, 4, *host.text(60)] if rewrites else [*request.token_ids]
            cached += [request.num_cached_tokens] if not turn else []
            for _ in range(others):
                host.ask(host.text(400), 20, (100, 399))
    first, second, third = cached
    assert (first, third) == (0, 8128)
    if checkpoints == 60:  # as many as an engine has by default
        assert second >= (4288 if others else 7872), "the first session's inner checkpoints"


def test_if_slots_are_few_the_likely_starts_get_them():
    host = Host(1, 2)
    prompt = host.text(1500)
    host.ask(prompt, 1, (100,))
    for length, cached in ((1500, 1488), (1300, 96)):
        request = Request("asks", [*prompt[:length], *host.text(50)], 1)
        assert host.scheduler.kv.find_prefix(request).num_tokens == cached


def test_a_prompt_leaves_checkpoints_where_others_may_start():
    request = Request("r", [1] * 1500, 1, checkpoint_positions=(100, 1200, 1490))
    likely = {96: 2, 400: 2, 1200: 2, 1488: 0}
    assert likely_starts(request, 0, 400, 16) == likely
    assert likely_starts(request, 400, 400, 16) == {1200: 2, 1488: 0}
    assert inner_starts(request, 0, 16) == {1232: 1, 976: 1, 464: 1}
    assert inner_starts(request, 976, 16) == {1232: 1}


def test_of_too_many_named_positions_the_first_and_the_last_count():
    named = tuple(range(100, 1500, 100))
    request = Request("r", [1] * 1500, 1, checkpoint_positions=named)
    starts = sorted(likely_starts(request, 0, 0, 100))
    assert starts == [100, *named[1 - MAX_NAMED :]]
    assert len(starts) == MAX_NAMED


def test_no_checkpoint_lies_within_a_span():
    request = Request("r", [1] * 1500, 1, checkpoint_positions=(700,), spans=((600, 1496),))
    assert likely_starts(request, 0, 800, 16) == {592: 2}
    assert inner_starts(request, 0, 16) == {592: 1, 464: 1}
