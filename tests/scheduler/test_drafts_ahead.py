"""A drafter drafts behind steps whose tokens are unknown: its drafts stay with their requests, and
change no token, whatever happens between."""

from contextlib import suppress
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine import workloads as workloads_of
from tests.support.engine.fake_engine import FakeEngine, answer_of, expected
from tests.support.engine.workloads import Workload, make_engine, seeded_workload, workloads
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import UNKNOWN_DRAFT
from vllm_metal_lite.config import MAX_MODEL_DRAFTS
from vllm_metal_lite.runner.drafter import Wanted
from vllm_metal_lite.runner.runner import known_tokens
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.speculation.speculator import Speculator


class Drafting:
    """Gives a FakeEngine a drafter, a share `right` of whose drafts is true, and lets it fail.

    seen: what happened.
    """

    def __init__(self, engine: FakeEngine, random: Random, right: float) -> None:
        self.engine, self.random, self.right = engine, random, right
        self.runner, self.seen = engine.runner, set[str]()
        self.execute, self.made = self.runner.execute, None
        self.runner.execute, self.runner.draft = self.launch, self.draft
        self.runner.attention = SimpleNamespace(overlaps=random.random() < 0.8)
        self.takes_hidden = random.random() < 0.5
        self.runner.drafter = SimpleNamespace(
            follows=True,
            can_draft=True,
            last_positions=self.last_positions,
            takes_hidden=self.takes_hidden,
        )
        self.runner.catch_up, self.followed = self.catch_up, dict[Request, set[int]]()
        self.seen_by = dict[Request, set[int]]()
        engine.in_flight.speculator = Drafts(engine, random)

    @property
    def request_at(self) -> dict[int, Request]:
        """The request of each seat."""
        return {seat: r for r, seat in self.engine.in_flight.seats.req_index.items()}

    def launch(self, batch, scored, masks, after):
        if self.made is not None and len(batch.draft_token_ids):
            rows = {"num_rows": batch.num_tokens, "token_ids": mx.array(batch.token_ids)}
            step, unknown = SimpleNamespace(batch=batch, **rows), batch.token_ids == UNKNOWN_DRAFT
            filled = np.array(known_tokens(step, UNKNOWN_DRAFT, *self.made))
            seats = batch.req_indices.repeat(np.diff(batch.cu_seqlens_q))
            for seat in set(seats[unknown].tolist()):
                got = filled[unknown & (seats == seat)].tolist()
                assert got == self.drafts[seat][: len(got)], "drafts of another request"
            batch = replace(batch, token_ids=filled)
        assert (batch.token_ids != UNKNOWN_DRAFT).all(), "a draft has no token"
        if (drafter := self.runner.drafter) is not None:
            self.follow(batch, drafter.follows)
            drafter.can_draft = drafter.follows
        self.last = batch
        return self.execute(batch, scored, masks, after)

    def follow(self, batch, follows: bool) -> None:
        """Note of each request which positions have K and V of the drafter."""
        starts = np.split(batch.positions, batch.cu_seqlens_q[1:-1])
        for seat, positions in zip(batch.req_indices.tolist(), starts, strict=True):
            request, rows = self.request_at[seat], set(positions.tolist())
            followed = self.followed.setdefault(request, set())
            if min(rows) not in followed and min(rows) - 1 not in self.seen_by.get(request, ()):
                followed |= set(range(min(rows)))  # the prefix cache has these
            self.seen_by[request] = rows
            self.followed[request] = followed | rows if follows else followed - rows

    def first_held(self, request: Request) -> int:
        """The first position whose blocks no window has released."""
        given_back = max(table.num_given_back for table in request.block_tables)
        return given_back * self.engine.config.block_size

    def catch_up(self, batch) -> None:
        self.seen.add("catches up")
        assert (batch.token_ids >= 0).all(), "a token is not known yet"
        batch.validate(*(g.num_blocks for g in self.engine.kv_groups))
        most = self.engine.config.max_num_batched_tokens // len(batch.req_indices)
        starts = np.split(batch.positions, batch.cu_seqlens_q[1:-1])
        for i, (seat, positions) in enumerate(zip(batch.req_indices.tolist(), starts, strict=True)):
            request = self.request_at[seat]
            followed = self.followed[request]
            for of_group, table in zip(batch.block_tables[:, i], request.block_tables, strict=True):
                own = table.block_ids[: positions[-1] // batch.block_size + 1]
                assert of_group[: len(own)].tolist() == own, "another request's blocks"
            held = self.first_held(request)
            assert positions[0] >= held, "a token's block belongs to another request"
            assert not followed.issuperset(positions.tolist()), "it has followed these tokens"
            if len(positions) == most:
                followed |= set(range(positions[0]))  # those before are left out
            followed |= set(positions.tolist())

    def draft(self, wanted: Wanted) -> mx.array | None:
        is_ahead = len(self.engine.in_flight.pipeline.steps) > 0
        self.seen.add("ahead" if is_ahead else "late")
        assert not (is_ahead and self.engine.scheduler.suspects), "a failure must show its step"
        if self.random.random() < 0.02:
            self.seen.add("failed")
            self.runner.drafter = None
            return None
        if self.random.random() < 0.05:
            self.seen.add("Ctrl-C")
            raise KeyboardInterrupt
        last, count = self.last, wanted.num_drafts
        rows = last.logits_indices[wanted.rows]
        assert (last.req_indices[last.sample_segments[wanted.rows]] == wanted.seats).all()
        newest, latest = last.positions[rows] + 1, wanted.pack()
        latest.validate(*(g.num_blocks for g in self.engine.kv_groups))
        if wanted.rejected is not None:
            self.seen.add("moved back")
            newest = newest - np.array(wanted.rejected)
        drafts = np.zeros((len(newest), count), np.int32)
        for i, (seat, at) in enumerate(zip(wanted.seats.tolist(), newest.tolist(), strict=True)):
            request = self.request_at[seat]
            held = request.num_blocks * self.engine.config.block_size
            assert latest.positions[i] < held, "a draft is in no block of its request"
            if not self.takes_hidden:
                lacks = set(range(self.first_held(request), at)) - self.followed[request]
                assert not lacks, "a draft model has not followed all tokens"
            answer = expected(self.engine, request)[at + 1 - request.num_prompt_tokens :]
            for depth, token in enumerate(answer[:count]):
                drafts[i, depth] = token if self.random.random() < self.right else 90
        self.made = wanted.seats, mx.array(drafts)
        self.drafts = dict(zip(wanted.seats.tolist(), drafts.tolist(), strict=True))
        return self.made[1]

    def last_positions(self, rows, num_drafts):
        at = self.last.positions[self.last.logits_indices[rows]]
        return at + num_drafts - self.takes_hidden


class Drafts(Speculator):
    """Drafts by the drafter, looked up, or none, at random."""

    def __init__(self, engine: FakeEngine, random: Random) -> None:
        flying = engine.in_flight
        most = random.randint(1, MAX_MODEL_DRAFTS)
        super().__init__(flying.seats.tokens_of, flying.model_drafts.draft, most)
        self.random = random

    def wants(self, decodes):
        return self.random.random() < 0.8

    def _choose(self, *args):
        return self.random.choice([0, 0, 9]), self.random.choice([0, *[self.max_model_drafts] * 4])

    def _look_up(self, request, most):
        return [7] * min(most, self.random.choice([0, 0, 0, 5]))


def play(workload: Workload, seed: int, right: float, **options) -> set[str]:
    engine = make_engine(workload, ahead=True, **options)
    drafting = Drafting(engine, Random(seed), right)
    run = workloads_of.stepper(workload, engine)

    def step() -> None:
        with suppress(KeyboardInterrupt):
            run()

    aborted = workloads_of.play(workload, engine, step)
    engine.step()
    engine.check_blocks()
    for name, request in engine.requests.items():
        if name not in aborted:
            assert answer_of(request)[: request.max_tokens] == expected(engine, request)
    counts = engine._counts
    assert all(pool.num_owned == 0 for pool in engine.scheduler.kv.pools)
    if counts.accepted_tokens:
        drafting.seen.add("accepted")
    return drafting.seen


@given(workloads(), st.integers(0, 100), st.sampled_from([0.0, 0.8, 1.0]))
@settings(max_examples=60)
def test_drafts_of_unknown_tokens_change_no_token(workload, seed, right):
    play(workload, seed, right)


def test_the_workloads_reach_the_hard_cases():
    seen = set[str]()
    for seed in range(40):
        extra = {"num_state_slots": 60} if seed % 3 == 0 else {}
        seen |= play(seeded_workload(seed), seed, [0.8, 1.0][seed % 2], **extra)
    assert seen == {
        "ahead",
        "late",
        "moved back",
        "failed",
        "accepted",
        "Ctrl-C",
        "catches up",
    }
