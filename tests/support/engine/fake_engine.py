"""LLMEngine over a model of numbers (`FakeModel`): for thousands of runs of the scheduler.

Only the runner is not the real one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from tests.support.engine.fake_model import VOCAB_SIZE, FakeModel, alone
from tests.support.engine.pool_accounts import check_accounts
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.assembly import Parts
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN, ForwardBatch
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.runner.result import StepResult, count_rejected
from vllm_metal_lite.sampling.sampler import Sampler, SamplerOutput
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.no_prefix_disk import NoPrefixDisk
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput
from vllm_metal_lite.scheduler.step_limit import StepLimit


class FakeConfig(EngineConfig):
    """Any values: with blocks smaller than an engine has, small cases have more boundaries."""

    def __post_init__(self) -> None:
        pass


def fake_config(block_size: int = 4, **options: Any) -> FakeConfig:
    return FakeConfig(block_size=block_size, **options)


class StepFailed(Exception):
    """Raised by a step that was told to fail."""


class FakeResult(StepResult):
    """A step of a FakeRunner, which may be told to fail while it is waited for."""

    def __init__(self, runner: "FakeRunner", batch: ForwardBatch, tokens: list[int]) -> None:
        sampled = mx.array(tokens, mx.int32)
        rejected = count_rejected(batch, mx.array(batch.token_ids), sampled)
        super().__init__(batch, SamplerOutput(sampled, None, sampled), rejected=rejected)
        self.runner, self.tokens = runner, tokens

    def wait(self) -> None:
        if self.runner.fails:
            raise StepFailed
        if not self.done:
            super().wait()
            self.runner.in_flight.remove(self)


class FakeRunner:
    """Replaces a ModelRunner.  launched: called after each launch."""

    drafter = None

    def __init__(self, model: FakeModel, sampler: Sampler) -> None:
        self.model, self.sampler, self.fails = model, sampler, False
        self.in_flight: list[FakeResult] = []
        self.launched: Callable[[], object] = lambda: None

    def execute(
        self, batch: ForwardBatch, num_prompt_logprobs: int, grammar: None, after: FakeResult | None
    ) -> FakeResult:
        if after is not None:
            seats = after.batch.sampled_seats.tolist()
            tokens = dict(zip(seats, after.tokens, strict=True))
            known = batch.token_ids.copy()
            for row in np.flatnonzero(known == UNKNOWN_TOKEN).tolist():
                known[row] = tokens[int(batch.req_indices[row])]
            batch = replace(batch, token_ids=known)
        assert (batch.token_ids != UNKNOWN_TOKEN).all()
        self.in_flight.append(FakeResult(self, batch, self.model(batch)))
        self.launched()
        return self.in_flight[-1]

    def forget(self) -> None:
        """Lose what the steps in flight should have written."""
        for step in self.in_flight:
            self.model.forget(step.batch)
        self.in_flight.clear()


@cache
def _loaded() -> LoadedModel:
    """The facts that an engine reads from its model, beside its forwards."""
    return tiny.load("llama", vocab_size=VOCAB_SIZE)


class FakeEngine(LLMEngine):
    """An engine of tokens without a real model.

    blocks: the KV groups, or the number of blocks of one group without a window.  ahead: steps are
    launched one ahead.  stops: tokens that end an answer.  num_state_slots: the state slots of a
    recurrent layer; 0: the model has no such layer.  requests: all requests ever added.  steps: the
    steps whose tokens are known.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: int | Sequence[KVGroup],
        max_model_len: int = 512,
        *,
        ahead: bool = False,
        stops: Sequence[int] = (),
        num_state_slots: int = 0,
    ) -> None:
        groups = [KVGroup(num_blocks=blocks)] if isinstance(blocks, int) else blocks
        groups = [replace(group, layers=(i,)) for i, group in enumerate(groups)]
        model = FakeModel(groups, config.block_size, num_state_slots)
        runner = FakeRunner(model, Sampler(config.max_num_seqs, VOCAB_SIZE))
        limit = None
        if config.max_step_seconds:
            limit = StepLimit(config.max_step_seconds, compiles=False)
        scheduler = Scheduler(config, groups, max_model_len, num_state_slots, limit=limit)
        super().__init__(_loaded(), config, Parts(scheduler, runner, NoPrefixDisk()))
        self.stops, self._launch = list(stops), self.in_flight.launch
        self.in_flight.launch = self.launch
        tiny.run_ahead(self, ahead)
        self.in_flight.speculator = None  # another one depends on measured times
        self.requests: dict[str, Request] = {}
        self.steps: list[SchedulerOutput] = []
        self.on_step = self.steps.append

    def add(
        self, prompt: list[int], max_tokens: int = 4, request_id: str = "", **fields: Any
    ) -> Request:
        """Add a request.  fields: further arguments of `add_request`, or fields of the Request."""
        number = len(self.requests)
        request_id = request_id or f"r{number}"
        self.intake.num_requests = fields.pop("arrival", number)
        params = tiny.greedy(max_tokens, ignore_eos=True, stop_token_ids=self.stops)
        how = {name: fields.pop(name) for name in ("priority", "checkpoints") if name in fields}
        asked = {"prompt_token_ids": prompt, "spans": fields.pop("spans", None)}
        self.add_request(request_id, asked, params, **how)
        self.requests[request_id] = request = self._answers[request_id].request
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    @property
    def unfinished(self) -> dict[str, Request]:
        return {name: answer.request for name, answer in self._answers.items()}

    def step(self, fails: bool = False) -> SchedulerOutput:
        """Run a step.  Returns the step that has completed, or an empty one.  fails: the wait for
        its tokens raises StepFailed."""
        before, self.runner.fails = len(self.steps), fails
        super().step()
        return self.steps[-1] if len(self.steps) > before else SchedulerOutput()

    def launch(self, output: SchedulerOutput) -> None:
        """Launch a step; it fails if it reads new blocks before they are written."""
        for segment in output.segments:
            is_new = segment.request in output.admitted
            shared = segment.num_computed // self.config.block_size if is_new else 0
            for group, new in enumerate(segment.new_block_ids):
                self.runner.model.poison(group, new[shared:])
        self._launch(output)

    def run(self, max_steps: int = 10_000) -> list[SchedulerOutput]:
        """Step until every request has finished; returns these steps."""
        before = len(self.steps)
        while self.unfinished:
            assert len(self.steps) - before < max_steps, "requests do not finish"
            assert not self.step().is_empty, "every request waits"
        return self.steps[before:]

    def check_blocks(self) -> None:
        """The pools' accounts, the requests' blocks and the block tables in use agree."""
        check_accounts(self.scheduler.kv, self.requests.values())
        for request in self.requests.values():
            seat, held = self.in_flight.seats.req_index.get(request), request.num_blocks
            if seat is None:
                assert not request.block_tables, "a request without a seat has blocks"
                continue
            assert self.in_flight.inputs.num_blocks[seat] == held
            for of_all, table in zip(
                self.in_flight.inputs.block_tables, request.block_tables, strict=True
            ):
                assert of_all[seat, :held].tolist() == table.block_ids
            assert self.in_flight.inputs.num_tokens[seat] == request.num_tokens


def answer_of(request: Request) -> list[int]:
    """The tokens sampled so far."""
    return request.token_ids[request.num_prompt_tokens :]


def shape(out: SchedulerOutput) -> list[tuple[str, int, int]]:
    """(request, its tokens computed before, its tokens in this step) of each segment."""
    return [(s.request.request_id, s.num_computed, s.num_scheduled) for s in out.segments]


def expected(engine: FakeEngine, request: Request) -> list[int]:
    """The tokens that a request must answer."""
    room = engine.max_model_len - request.num_prompt_tokens
    windows = tuple(group.window for group in engine.kv_groups)
    return alone(tuple(request.prompt_token_ids), min(request.max_tokens, room), windows)
