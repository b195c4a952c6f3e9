"""The synchronous engine: queues requests, runs steps, reports outputs."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from vllm_metal_lite.assembly import Parts, assemble
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.answer import Answer
from vllm_metal_lite.engine.chat_prompt import ChatPrompt
from vllm_metal_lite.engine.failed_steps import FailedSteps
from vllm_metal_lite.engine.intake import Intake
from vllm_metal_lite.engine.one_thread import check_process
from vllm_metal_lite.engine.prompt_ids import Prompt
from vllm_metal_lite.engine.steps_in_flight import StepsInFlight
from vllm_metal_lite.errors import ConfigError, RequestError, show
from vllm_metal_lite.model.drafter import with_drafter
from vllm_metal_lite.model.loader import LoadedModel, load
from vllm_metal_lite.outputs import RequestOutput
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.runner.pipeline import StepInFlight
from vllm_metal_lite.runner.runner import ModelRunner, StatesLost
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.counts import StepCounts, count
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.request import Request, RequestStatus
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput


class LLMEngine:
    """Accepts requests at any time; each `step` runs one packed forward and reports its tokens.

    Not thread-safe: one thread adds, aborts and steps (coroutines use `AsyncEngine`).
    parts: by default those that suit this device, see `assemble`.
    """

    def __init__(
        self, model: LoadedModel, config: EngineConfig | None = None, parts: Parts | None = None
    ) -> None:
        self.lock = threading.RLock()  # held by the thread that uses the engine
        self.config = config = _config_of(config)
        may_draft = config.speculate == "auto" and model.ranks.size == 1
        if parts is None and model.drafter is None and may_draft:
            model = with_drafter(model, config.draft_model, config.dtype, config.trust_remote_code)
        self.model = model.with_kv_bits(config.kv_bits)
        parts = parts or assemble(self.model, config)
        self.scheduler, _, self.prefix_disk, self.eyes = parts
        self.intake = Intake(self.model, self.max_model_len, config, self.eyes)
        self._answers: dict[str, Answer] = {}  # by the scheduler's request id
        self._requests: dict[str, list[Answer]] = {}  # unfinished, by the user's request id
        self.in_flight = StepsInFlight(self.model, parts, self._answers)
        self.failed_steps = FailedSteps(self.scheduler)
        self._counts = StepCounts()
        # Called after each completed step, for watchers of the engine.
        self.on_step: Callable[[SchedulerOutput], None] | None = None

    @classmethod
    def from_name(cls, name: str = "demo", config: EngineConfig | None = None) -> "LLMEngine":
        """Load a model ("demo", a folder or a Hugging Face name) and build its engine."""
        check_process()
        config = _config_of(config)
        return cls(load(name, config.dtype, config.trust_remote_code), config)

    @property
    def runner(self) -> ModelRunner:
        return self.in_flight.pipeline.runner

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        return self.scheduler.kv.groups

    @property
    def max_model_len(self) -> int:
        """The longest context, in tokens."""
        return self.scheduler.max_model_len

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
    ) -> tuple[dict[str, Any], tuple[int, ...]]:
        """(Prompt, `checkpoints`) of a conversation under the model's chat template.  The prompt
        has its token ids and pictures."""
        messages, pictures = self.eyes.split(messages)
        model, named = self.model, self.scheduler.kv.uses_checkpoints
        expand = partial(self.eyes.expand, pictures=pictures) if pictures else str
        prompt = ChatPrompt(model.tokenizer, model.name, with_checkpoints=named, expand=expand)
        token_ids, checkpoints = prompt.turn(messages, add_generation_prompt, variables)
        made = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": pictures}}
        return made, checkpoints

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
        "cache_salt": only prompts of the same salt share blocks; with "spans": (start, end) of
        tokens that one step computes together, [(0, None)] for the whole prompt; and with
        "multi_modal_data": {"image": [...]}, see docs/images.md.
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
                self.in_flight.constraints.add(request, answer.constraint, answer.params)
                self._counts.forced_tokens += request.num_tokens - request.num_prompt_tokens
            if pooling is not None and pooling.score_token_ids is None:
                self.in_flight.pooling.add(request, pooling, request.num_prompt_tokens)
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
        steps, flying = self.in_flight, self.in_flight.pipeline.steps
        try:
            if not flying:
                self.prefix_disk.between_steps()
                steps.launch(self.scheduler.schedule(steps.propose))
            if not flying:
                steps.pause()
                self.prefix_disk.wait()
                return []
            steps.advance()
            if self._may_run_ahead(flying[0].scheduled):
                steps.launch(self.scheduler.schedule())
            elif not self.scheduler.suspects:
                steps.draft_ahead()
            step = steps.finish()
        except StatesLost:  # a kernel was replaced; the next call runs the step without it
            steps.rollback()
            return []
        except Exception as e:
            # Without a step in flight the scheduler has failed, which no other step can disprove.
            launched = steps.outputs
            is_wanted = self.failed_steps.blame(launched, e)
            steps.rollback()
            hopeless = self.failed_steps.is_hopeless
            if launched and hopeless and steps.works(self.intake.one_token()):
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
        if self.in_flight.pipeline.steps:  # an answer ended before its last step
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
        return not self.in_flight.wants_drafts()

    def _finish(self, step: StepInFlight[SchedulerOutput]) -> list[RequestOutput]:
        """Record a completed step; returns the requests that got a token."""
        output, result = step.scheduled, step.result
        self.in_flight.record(step)
        if result.prompt_logprobs is not None:
            for row, i in enumerate(result.batch.prompt_segments.tolist()):
                if (answer := self._answer_of(output.segments[i].request)) is not None:
                    answer.append_prompt_logprobs(result.prompt_logprobs, row)
        requests = [s.request for s in output.segments]
        for request, values in self.in_flight.pooling.take(result.batch, requests, result.pooled):
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
            self.in_flight.pause()
        return list(reports.values())

    def _answer_of(self, request: Request) -> Answer | None:
        """The answer of a request; None if the request ended while its step was in flight."""
        is_over = request.status is RequestStatus.FINISHED
        return None if is_over else self._answers[request.request_id]

    def _end(self, answer: Answer) -> None:
        """Release everything that a finished answer holds."""
        self.scheduler.finish(answer.request)
        self.in_flight.remove(answer.request)
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

        prefill_tokens: tokens of prompts, and of preempted requests that start again.
        decode_tokens: tokens of answers, without the first of each answer.
        forced_tokens: tokens that were known without sampling.
        draft_tokens, accepted_tokens: drafts, and those that became tokens of an answer.
        failed_kernels: kernels that failed on this device, at the start or in a step.
        attention_by_segment: 1 if attention runs one segment at a time, which is slow.
        memory_*_bytes: MLX's memory in this process; cached ones are freed buffers that MLX keeps.
        """
        return {
            **asdict(self._counts),
            "steps_ahead": self.in_flight.pipeline.num_ahead,
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
