"""The synchronous engine: queues requests, runs steps, reports outputs."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.batch.pooling_table import PoolingTable
from vllm_metal_lite.config import MAX_DRAFT, EngineConfig
from vllm_metal_lite.engine.answer import Answer
from vllm_metal_lite.engine.chat_prompt import ChatPrompt
from vllm_metal_lite.engine.constraints import Constraints
from vllm_metal_lite.engine.failed_steps import FailedSteps
from vllm_metal_lite.engine.intake import Intake
from vllm_metal_lite.engine.no_prefix_disk import NoPrefixDisk
from vllm_metal_lite.engine.one_thread import check_process
from vllm_metal_lite.engine.prompt_ids import Prompt
from vllm_metal_lite.engine.seats import Seats
from vllm_metal_lite.engine.steps_in_flight import StepsInFlight
from vllm_metal_lite.errors import ConfigError, RequestError, show
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.loader import LoadedModel, load
from vllm_metal_lite.outputs import RequestOutput
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.runner.build import build_runner, optional_module
from vllm_metal_lite.runner.memory import size_store
from vllm_metal_lite.runner.pipeline import Pipeline, StepInFlight
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.runner.runner import ModelRunner, StatesLost
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.counts import StepCounts, count
from vllm_metal_lite.scheduler.request import Request, RequestStatus
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput
from vllm_metal_lite.scheduler.step_limit import StepLimit
from vllm_metal_lite.speculation.speculator import Speculator


class LLMEngine:
    """Accepts requests at any time; each `step` runs one packed forward and reports its tokens.

    Not thread-safe: one thread adds, aborts and steps (coroutines use `AsyncEngine`).
    """

    def __init__(self, model: LoadedModel, config: EngineConfig | None = None) -> None:
        self.lock = threading.RLock()  # held by the thread that uses the engine
        self.config = config = _config_of(config)
        self.model = model = model.with_kv_bits(config.kv_bits)
        self.kv_groups, self.max_model_len, self.num_state_slots = size_store(model, config)
        backend.set_memory_limits()
        seats, size = config.max_num_seqs, config.block_size
        states = model.packed.state_store(self.num_state_slots)
        store = PagedStore(model.kv_specs, self.kv_groups, size, states=states)
        caching = model.caches_prefixes(config)
        self.scheduler = Scheduler(
            replace(config, enable_prefix_caching=caching),
            self.kv_groups,
            self.max_model_len,
            num_state_slots=self.num_state_slots,
            shares_in_step=model.packed.by_segment is None,
        )
        # Cached prefixes that survive a restart.
        wants_disk = caching and config.prefix_disk_gib > 0
        disk = optional_module("prefix_disk.disk") if wants_disk else None
        # Before fusion, which changes the weights that identify the model to the folder.
        kept = None if disk is None else disk.attach(model, self.scheduler, store)
        self.prefix_disk = NoPrefixDisk() if kept is None else kept
        self.scheduler.must_wait = self.prefix_disk.must_wait
        sampler = Sampler(seats, model.vocab_size)
        runner = build_runner(model, store, sampler, config.attention)
        self.inputs = InputBatch(seats, self.max_model_len, size, len(self.kv_groups))
        self.pipeline = Pipeline[SchedulerOutput](runner, self.inputs)
        self.seats = Seats(self.inputs, sampler, model.eos_token_ids)
        self.intake = Intake(model, self.max_model_len, config)
        named = self.scheduler.kv.uses_checkpoints
        self._chat_prompt = ChatPrompt(model.tokenizer, model.name, with_checkpoints=named)
        self.failed_steps = FailedSteps(self.scheduler)
        self.constraints = Constraints(model.vocab_size)
        self.pooling = PoolingTable()
        # Each rank measures its own times, so ranks would choose different drafts and chunks.
        is_alone = model.ranks.size == 1
        speculates = config.speculate == "auto" and is_alone
        self.speculator = Speculator(self.seats.tokens_of) if speculates else None
        if config.max_step_seconds and is_alone:
            self.scheduler.limit = StepLimit(config.max_step_seconds, not backend.is_cpu())
        self._last_end: float | None = None  # when the last step ended, while there is work
        self._answers: dict[str, Answer] = {}  # by the scheduler's request id
        self._requests: dict[str, list[Answer]] = {}  # unfinished, by the user's request id
        self._counts = StepCounts()
        # Called after each completed step, for watchers of the engine.
        self.on_step: Callable[[SchedulerOutput], None] | None = None
        self.in_flight = StepsInFlight(
            self.scheduler, self.pipeline, self.seats, self.constraints, self.pooling, self._answers
        )

    @classmethod
    def from_name(cls, name: str = "demo", config: EngineConfig | None = None) -> "LLMEngine":
        """Load a model ("demo", a folder or a Hugging Face name) and build its engine."""
        check_process()
        config = _config_of(config)
        return cls(load(name, config.dtype, config.trust_remote_code), config)

    @property
    def runner(self) -> ModelRunner:
        return self.pipeline.runner

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a request without any: the model's own (generation_config.json), else
        SamplingParams' defaults."""
        return SamplingParams(**self.model.sampling_defaults)

    # Requests

    def render_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> tuple[list[int], tuple[int, ...]]:
        """(Token ids, `checkpoints`) of a conversation under the model's chat template."""
        return self._chat_prompt.turn(messages, add_generation_prompt, variables)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        priority: int = 0,
        fair_round: int = 0,
        checkpoints: Sequence[int] = (),
    ) -> None:
        """Queue a request.  RequestError, SamplingError and BusyError leave the engine as it was.

        prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids", and perhaps with
        "cache_salt": only prompts of the same salt share blocks; and with "spans": (start, end) of
        tokens that one step computes together, [(0, None)] for the whole prompt.
        params: by default `get_default_sampling_params`.  PoolingParams: the prompt is only read,
        and its finished output has `pooled`.
        priority: lower goes first, then the lower fair_round, which keeps a server fair.
        checkpoints: numbers of prompt tokens after which other prompts may continue differently,
        such as the end of a system prompt.  Models with recurrent layers keep their state there.
        """
        check_process()
        answers = self.intake.answers(request_id, prompt, params, priority, fair_round, checkpoints)
        names = [answer.request.request_id for answer in answers]
        if request_id in self._requests or any(name in self._answers for name in names):
            raise RequestError(f"request_id {show(request_id)} is already in use")
        for answer in answers:
            request, pooling = answer.request, answer.pooling
            self.scheduler.add(request)  # all are alike: if it refuses, it refuses the first
            self._answers[request.request_id] = answer
            if answer.constraint is not None:
                self.constraints.add(request, answer.constraint, answer.params)
                self._counts.forced_tokens += request.num_tokens - request.num_prompt_tokens
            if pooling is not None and pooling.score_token_ids is None:
                self.pooling.add(request, pooling, request.num_prompt_tokens)
        self._requests[request_id] = answers
        self.intake.num_requests += 1

    def abort(self, request_ids: str | Iterable[str], error: str = "") -> list[RequestOutput]:
        """End requests with their current tokens; returns their outputs.  Ignores unknown ids.
        error: why, in one line; "": the caller wants the end."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        ids = list(ids) if isinstance(ids, Iterable) else [ids]
        if not all(isinstance(request_id, str) for request_id in ids):
            raise RequestError(f"request_ids must be strings, got {show(request_ids)}")
        ended = []
        for request_id in ids:
            for answer in self._requests.get(request_id, []):
                if not answer.output.finished:
                    answer.abort(error)
                    self._end(answer)
                    if answer.result.finished:
                        ended.append(answer.result)
        return ended

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    # Steps

    def step(self) -> list[RequestOutput]:
        """Submit the next forward, then wait for the current one; returns the requests that got a
        token (all their output so far).

        If a forward fails (an error or Ctrl-C), all scheduled requests return to the queue before
        the exception propagates: nothing is lost.  An error of a forward whose requests have all
        ended is only logged.  If recording its tokens fails, the step is not repeated.  The caller
        ends `requests_at_fault` with the error, often none, and may call `step` again.
        """
        steps = self.in_flight
        propose = None if self.speculator is None else self._propose
        try:
            if not steps.steps:
                self.prefix_disk.between_steps()
                steps.launch(self.scheduler.schedule(propose))
            if not steps.steps:
                self._last_end = None
                self.prefix_disk.wait()
                return []
            steps.advance()
            if self._may_run_ahead(steps.steps[0].scheduled):
                steps.launch(self.scheduler.schedule())
            step = steps.finish()
        except StatesLost:  # a kernel was replaced; the next call runs the step without it
            steps.rollback()
            return []
        except Exception as e:
            is_wanted = self.failed_steps.blame(steps.outputs, e)
            steps.rollback()
            if self.failed_steps.is_hopeless and steps.works(self.intake.one_token()):
                self.failed_steps.num_failures = 0
            if is_wanted:
                raise
            return []
        except BaseException:
            steps.rollback()
            raise
        requests = step.scheduled.running
        try:
            return self._finish(step)
        except Exception as e:
            self.failed_steps.recording_failed(requests, e)
            raise

    def rest(self) -> bool:
        """Do a little work that can wait for a pause; returns whether more is left."""
        if self._requests:
            return False
        if self.in_flight.steps:  # an answer ended before its last step
            self.step()
        return self.prefix_disk.rest()

    @property
    def requests_at_fault(self) -> list[str]:
        """Ids of the requests that must end because `step` raised.  The engine may no longer
        know some of them: their last token was recorded, but no caller saw it."""
        at_fault = [request.parent_id for request in self.failed_steps.at_fault]
        others = self._requests if self.failed_steps.is_hopeless else ()
        return list(dict.fromkeys([*at_fault, *others]))

    def _may_run_ahead(self, output: SchedulerOutput) -> bool:
        """Whether the next step may be launched before the tokens of `output` are known."""
        if self.scheduler.suspects:  # a failure must show its step
            return False
        if output.has_drafts or self.prefix_disk.has_copies or self.scheduler.may_preempt():
            return False
        if self.speculator is None or not self.scheduler.drafts.has_room:
            return True
        return not self.speculator.wants(self.scheduler.decodes)

    def _propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """The drafts of decodes (`scheduler.drafts`), within the requests' constraints."""
        assert self.speculator is not None, "without a speculator, no step has drafts"
        drafts = self.speculator.propose(wanted)
        if not any(drafts):
            return drafts
        return [
            self.constraints.continued(request, draft, min(most, MAX_DRAFT))
            for (request, most), draft in zip(wanted, drafts, strict=True)
        ]

    def _finish(self, step: StepInFlight[SchedulerOutput]) -> list[RequestOutput]:
        """Record a completed step; returns the requests that got a token."""
        output, result = step.scheduled, step.result
        self._record(output, result)
        if result.prompt_logprobs is not None:
            for row, i in enumerate(result.batch.prompt_segments.tolist()):
                if (answer := self._answer_of(output.segments[i].request)) is not None:
                    answer.append_prompt_logprobs(result.prompt_logprobs, row)
        requests = [s.request for s in output.segments]
        for request, values in self.pooling.take(result.batch, requests, result.pooled):
            self._answers[request.request_id].result.pooled = values
        reports: dict[str, RequestOutput] = {}
        num_new = num_accepted = 0
        for request, rows in zip(output.terminal, result.live_rows, strict=True):
            if (answer := self._answer_of(request)) is None:
                continue
            before = len(answer.output.token_ids)
            if answer.take(result, rows):
                self._end(answer)
            count = len(answer.output.token_ids)
            num_new += max(count - max(before, 1), 0)
            if len(rows) > 1:  # the tokens behind the first were drafts
                num_accepted += max(count - before - 1, 0)
            reports[answer.result.request_id] = answer.result
        self._counts.add(output, num_new, num_accepted)
        self.prefix_disk.step_finished(output)
        if self.on_step is not None:
            self.on_step(output)
        self.failed_steps.succeeded(output)
        if not self._requests:
            self._last_end = None
        return list(reports.values())

    def _answer_of(self, request: Request) -> Answer | None:
        """The answer of a request; None if the request ended while its step was in flight."""
        is_over = request.status is RequestStatus.FINISHED
        return None if is_over else self._answers[request.request_id]

    def _record(self, output: SchedulerOutput, result: StepResult) -> None:
        """Tell the scheduler the step's tokens, and the sampler those of a step with drafts."""
        tokens = result.token_ids.tolist()
        output.seconds = result.ended_at - (self._last_end or output.launched_at)
        self._last_end = result.ended_at
        live, drawn = result.live_rows, dict[Request, list[int]]()
        if output.has_drafts:
            for request, rows in zip(output.terminal, live, strict=True):
                drawn[request] = [tokens[row] for row in rows if row not in result.no_token]
        accepted = {request: known[1:] for request, known in drawn.items()}
        firsts = (UNKNOWN_TOKEN if r.start in result.no_token else tokens[r.start] for r in live)
        self.scheduler.update(output, list(firsts), accepted)
        forced = {request for request, _ in output.forced}  # the sampler knows their tokens
        for request, known in drawn.items():
            if request not in forced:
                self.seats.accept(request, known)
        counts = [len(accepted[s.request]) for s in output.segments if s.draft_token_ids]
        if self.speculator is not None:
            self.speculator.record(output, counts, output.seconds)
        if self.scheduler.limit is not None:
            self.scheduler.limit.record(output)

    def _end(self, answer: Answer) -> None:
        """Release everything that a finished answer holds."""
        self.scheduler.finish(answer.request)
        self.constraints.remove(answer.request)
        self.pooling.remove(answer.request)
        self.seats.remove(answer.request)
        del self._answers[answer.request.request_id]
        result = answer.result
        if all(o.finished for o in result.outputs):
            result.finished = True
            del self._requests[result.request_id]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes.  Running requests keep their blocks, but no request finds
        the blocks that they compute, including those of the step in flight."""
        self.scheduler.kv.reset()
        self.prefix_disk.reset()

    def metrics(self) -> dict[str, int]:
        """Counters since the engine was created, and the present counts; see also `count`.

        prefill_tokens: of prompts, and of preempted requests that start again.
        decode_tokens: of answers, without each one's first.  forced_tokens: known without sampling.
        draft_tokens, accepted_tokens: computed ahead, and those that became tokens of an answer.
        failed_kernels: kernels that failed on this device, at the start or in a step.
        attention_by_segment: 1 if attention runs one segment at a time, which is slow.
        memory_*_bytes: MLX's memory in this process; cached ones are freed buffers that MLX keeps.
        """
        return {
            **asdict(self._counts),
            "steps_ahead": self.pipeline.num_ahead,
            "compiled_steps": self.runner.num_compiled_steps,
            "failed_kernels": len(self.runner.path.failed_kernels),
            "attention_by_segment": int(self.model.packed.by_segment is not None),
            "memory_active_bytes": mx.get_active_memory(),
            "memory_cached_bytes": mx.get_cache_memory(),
            **count(self.scheduler),
            **self.prefix_disk.metrics(),
        }


def _config_of(config: EngineConfig | None) -> EngineConfig:
    config = EngineConfig() if config is None else config
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config must be an EngineConfig, got {show(config)}")
    return config
