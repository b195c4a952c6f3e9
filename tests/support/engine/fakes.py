"""A model without a model: wrong tokens follow from any wrong slot, block, share or lost write.

`FakeModel` keeps numbers where a real one keeps K and V, and is read and written as the real one
is: through the slots and block tables of a `ForwardBatch`, layer by layer, every row of a step
written before any is read.  `FakeEngine` is the engine's loop around it, without MLX.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tests.support.engine.pool_accounts import check_accounts
from vllm_metal_lite.batch.forward_batch import NO_DRAFT, UNKNOWN_TOKEN, ForwardBatch
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.scheduler.drafts import Propose
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

VOCAB_SIZE = 1000
MAX_LEN = 4096
_EMPTY = -1
_MASK = (1 << 64) - 1
_A = np.random.default_rng(0).integers(1, 1 << 63, (4, MAX_LEN), dtype=np.uint64) | np.uint64(1)


def splitmix64(x: Any) -> Any:
    """Its finaliser, of an array of uint64 or a Python int."""
    if isinstance(x, int):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return x ^ (x >> 31)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=100_000)
def alone(
    prompt: tuple[int, ...], max_tokens: int, windows: tuple[int | None, ...] = (None,)
) -> list[int]:
    """What a FakeModel of KV groups with these windows answers to a prompt that is alone."""
    tokens, layers = list(prompt), _layers(windows)
    past: list[list[int]] = [[] for _ in layers]  # sums up to each token
    for i in range(len(prompt) + max_tokens - 1):
        number = tokens[i]
        for layer, sums in enumerate(past):
            sums.append(((sums[-1] if i else 0) + (number + 1) * int(_A[layer, i])) & _MASK)
            start = i - (windows[layers[layer]] or MAX_LEN)
            number = splitmix64((sums[i] - (sums[start] if start >= 0 else 0)) & _MASK)
        if i >= len(prompt) - 1:
            tokens.append(number % VOCAB_SIZE)
    return tokens[len(prompt) :]


def _layers(groups: Sequence[Any]) -> list[int]:
    """The KV group of each layer of a FakeModel: there are at least two layers."""
    return list(range(len(groups))) if len(groups) > 1 else [0, 0]


class FakeModel:
    """A layer for each KV group, but at least two, each with a number a slot.

    Layer 0 stores a row's token; each further one a hash of what that row sees in the layer before,
    as a real K and V depend on earlier tokens; the next token is a hash of what a row sees in the
    last one.
    """

    def __init__(self, groups: Sequence[KVGroup], block_size: int) -> None:
        self.groups, self.block_size, self.layers = groups, block_size, _layers(groups)
        shapes = [(g.num_blocks, block_size) for g in groups]
        self.positions = [np.full(shape, _EMPTY, np.int64) for shape in shapes]
        self.numbers = [np.zeros(shapes[g], np.uint64) for g in self.layers]

    def poison(self, group: int, block_ids: Sequence[int]) -> None:
        """A step that reads these blocks before they are written fails."""
        self.positions[group][block_ids] = _EMPTY

    def forget(self, batch: ForwardBatch) -> None:
        """As if a step's rows had never been written."""
        for group, positions in enumerate(self.positions):
            positions.reshape(-1)[batch.slot_mapping(group)] = _EMPTY

    def __call__(self, batch: ForwardBatch) -> list[int]:
        """Run a step; returns a token for each sampled row."""
        batch.validate(*(g.num_blocks for g in self.groups))
        at, size = np.arange(batch.seq_lens.max()), batch.block_size
        lengths = np.diff(batch.cu_seqlens_q)
        first = (batch.seq_lens - lengths)[:, None]
        segment = np.repeat(np.arange(batch.num_segments), lengths)
        numbers = batch.token_ids.astype(np.uint64)
        for layer, group in enumerate(self.layers):
            rows, window = batch.slot_mapping(group), self.groups[group].window or MAX_LEN
            slots = batch.block_tables[group][:, at // size] * size + at % size
            assert len(set(rows.tolist())) == batch.num_tokens, "a slot is written twice"
            stored, positions = self.numbers[layer].reshape(-1), self.positions[group].reshape(-1)
            stored[rows], positions[rows] = numbers, batch.positions
            seen = (at < batch.seq_lens[:, None]) & (at > first - window)
            assert (positions[slots] == at)[seen].all(), "a row reads what is not there, or moved"
            terms = np.where(seen, (stored[slots] + np.uint64(1)) * _A[layer, at], np.uint64(0))
            past = np.cumsum(terms, axis=1)
            before = batch.positions - window
            behind = np.where(before < 0, np.uint64(0), past[segment, np.maximum(before, 0)])
            numbers = splitmix64(past[segment, batch.positions] - behind)
        ends = numbers[batch.logits_indices[: len(batch.sample_segments)]]
        return (ends % np.uint64(VOCAB_SIZE)).astype(int).tolist()


def fake_config(block_size: int = 4, **options: Any) -> EngineConfig:
    """EngineConfig with blocks smaller than it allows: small cases then have more boundaries."""
    threshold = options.pop("long_prefill_token_threshold", 0)
    config = EngineConfig(**options)
    object.__setattr__(config, "block_size", block_size)
    object.__setattr__(config, "long_prefill_token_threshold", threshold)
    return config


@dataclass
class FakeStep:
    out: SchedulerOutput
    batch: ForwardBatch
    tokens: list[int]

    @property
    def seats(self) -> np.ndarray:
        """Of its terminal segments."""
        return self.batch.sampled_seats


class StepFailed(Exception):
    """Raised by a step that was told to fail."""


class FakeEngine:
    """Scheduler, InputBatch and FakeModel in the engine's loop.

    blocks: the KV groups, or the number of blocks of one group without a window.
    propose: makes drafts, see `scheduler.drafts`.
    """

    def __init__(
        self, config: EngineConfig, blocks: int | Sequence[KVGroup], max_model_len: int = 512
    ) -> None:
        groups = [KVGroup(num_blocks=blocks)] if isinstance(blocks, int) else blocks
        self.scheduler = Scheduler(config, groups, max_model_len)
        self.inputs = InputBatch(config.max_num_seqs, max_model_len, config.block_size, len(groups))
        self.model = FakeModel(groups, config.block_size)
        self.windows = tuple(g.window for g in groups)
        self.block_size = config.block_size
        self.max_model_len = max_model_len
        self.propose: Propose | None = None
        self.requests: dict[str, Request] = {}  # all that were ever added
        self.seated: list[Request] = []
        self.unfinished: dict[str, Request] = {}

    def add(self, prompt: list[int], max_tokens: int = 4, **options: Any) -> Request:
        number = len(self.requests)
        request_id = options.pop("request_id", f"r{number}")
        request = Request(request_id, prompt, max_tokens, **{"arrival": number, **options})
        self.scheduler.add(request)
        self.requests[request_id] = self.unfinished[request_id] = request
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.unfinished.pop(request.request_id, None)
        self._unseat(request)

    def schedule(self) -> SchedulerOutput:
        """The first half of a step: decide it, and give out rows and blocks."""
        out = self.scheduler.schedule(self.propose)
        for request in out.preempted:
            self._unseat(request)
        for request in out.admitted:
            request.req_index = self.inputs.add(request.token_ids, request.num_prompt_tokens)
            self.seated.append(request)
        for segment in out.segments:
            if segment.new_block_ids:
                self.inputs.append_blocks(segment.request.req_index, *segment.new_block_ids)
            is_new = segment.request in out.admitted
            shared = segment.num_computed // self.block_size if is_new else 0
            for group, new in enumerate(segment.new_block_ids):
                self.model.poison(group, new[shared:])
        return out

    def execute(self, out: SchedulerOutput, fail: bool = False) -> None:
        """The second half: run it, and take note of the tokens.  fail: nothing is written."""
        if fail:
            for segment in out.segments:
                self._unseat(segment.request)
            self.scheduler.rollback(out)
            raise StepFailed
        step = self._launch(out)
        self._advance(step)
        self._finish(step)

    def _launch(self, out: SchedulerOutput, after: FakeStep | None = None) -> FakeStep:
        """Run a step.  after: the step before, whose tokens the table may not have yet."""
        batch = self.inputs.pack(
            np.array([s.request.req_index for s in out.segments]),
            np.array([s.num_computed for s in out.segments]),
            np.array([s.num_scheduled for s in out.segments]),
            drafts=[s.draft_token_ids for s in out.segments] if out.has_drafts else None,
        )
        if after is not None:
            tokens = dict(zip(after.seats.tolist(), after.tokens, strict=True))
            known = batch.token_ids.copy()
            for row in np.flatnonzero(known == UNKNOWN_TOKEN).tolist():
                known[row] = tokens[int(batch.req_indices[row])]
            batch = replace(batch, token_ids=known)
        assert (batch.token_ids != UNKNOWN_TOKEN).all()
        return FakeStep(out, batch, self.model(batch))

    def _advance(self, step: FakeStep) -> None:
        ended = self.scheduler.advance(step.out)
        self.inputs.append_tokens(step.seats, np.full(len(step.seats), UNKNOWN_TOKEN))
        for request in ended:
            self._unseat(request)

    def _finish(self, step: FakeStep) -> None:
        if step.out.has_drafts:
            self._accept(step)
        else:
            self.inputs.fill_tokens(step.seats, np.array(step.tokens, np.int32))
            self.scheduler.update(step.out, step.tokens)
        for request in step.out.terminal:
            if request.request_id in self.unfinished and self._has_ended(request):
                self.abort(request)

    def _accept(self, step: FakeStep) -> None:
        drawn: list[list[int]] = []
        before, is_live = NO_DRAFT, True  # the draft that a row was computed from
        drafts = step.batch.draft_token_ids.tolist()
        for seat, token, draft in zip(step.seats.tolist(), step.tokens, drafts, strict=True):
            if before == NO_DRAFT:
                drawn.append([])
                is_live = True
            elif is_live:
                is_live = drawn[-1][-1] == before
            if is_live:
                drawn[-1].append(token)
            if draft == NO_DRAFT:
                self.inputs.replace_unknown(seat, drawn[-1])
            before = draft
        more = dict(zip(step.out.terminal, (tokens[1:] for tokens in drawn), strict=True))
        self.scheduler.update(step.out, [tokens[0] for tokens in drawn], more)

    def _has_ended(self, request: Request) -> bool:
        room = self.max_model_len - request.num_prompt_tokens
        return len(answer_of(request)) >= min(request.max_tokens, room)

    def step(self) -> SchedulerOutput:
        out = self.schedule()
        self.execute(out)
        return out

    def run(self, max_steps: int = 10_000) -> list[SchedulerOutput]:
        """Step until every request has finished."""
        steps = []
        while self.unfinished:
            assert len(steps) < max_steps, "requests do not finish"
            steps.append(self.step())
            assert not steps[-1].is_empty, "every request waits"
        return steps

    def check_blocks(self) -> None:
        """The pools' accounts, the requests' blocks and the block tables in use agree; nobody gave
        back what it has use for."""
        check_accounts(self.scheduler.kv, self.requests.values())
        for request in self.seated:
            row, held = request.req_index, request.num_blocks
            assert self.inputs.num_blocks[row] == held
            for group, (of_all, table) in enumerate(
                zip(self.inputs.block_tables, request.block_tables, strict=True)
            ):
                assert of_all[row, :held].tolist() == table.block_ids
                used = self.model.groups[group].first_block(
                    request.num_computed_tokens, self.block_size
                )
                assert table.num_given_back <= used
            assert self.inputs.num_tokens[row] == request.num_tokens
        waiting = [r for r in self.requests.values() if r.req_index is None]
        assert not any(r.block_tables for r in waiting), "a request without a seat has blocks"

    def _unseat(self, request: Request) -> None:
        if request.req_index is not None:
            self.inputs.remove(request.req_index)
            self.seated.remove(request)
            request.req_index = None


def answer_of(request: Request) -> list[int]:
    """The tokens sampled so far."""
    return request.token_ids[request.num_prompt_tokens :]


def shape(out: SchedulerOutput) -> list[tuple[str, int, int]]:
    """(request, its tokens computed before, its tokens in this step) of each segment."""
    return [(s.request.request_id, s.num_computed, s.num_scheduled) for s in out.segments]


def expected(
    request: Request, max_model_len: int, windows: tuple[int | None, ...] = (None,)
) -> list[int]:
    """The tokens that a request of a FakeEngine must answer."""
    room = max_model_len - request.num_prompt_tokens
    return alone(tuple(request.prompt_token_ids), min(request.max_tokens, room), windows)
