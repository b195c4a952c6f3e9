"""The steps in flight: launched one ahead, finished in order, and undone together if one fails."""

import time
from collections.abc import Sequence
from functools import partial

from vllm_metal_lite.assembly import Parts
from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.engine.answer import Answer
from vllm_metal_lite.engine.constraints import Constraints
from vllm_metal_lite.engine.model_drafts import ModelDrafts
from vllm_metal_lite.engine.seats import Seats
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.runner.pictures import with_pictures
from vllm_metal_lite.runner.pipeline import Pipeline, StepInFlight
from vllm_metal_lite.runner.pooling_table import PoolingTable
from vllm_metal_lite.runner.runner import StatesLost
from vllm_metal_lite.sampling.masks import TokenMasks
from vllm_metal_lite.scheduler.drafts import Propose
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput, Segment
from vllm_metal_lite.speculation.speculator import Speculator


class StepsInFlight:
    """Runs scheduled steps, at most two at a time.

    answers: the unfinished ones, by the scheduler's request id.
    pipeline: holds the steps in flight.  speculator: makes drafts; None: no step has any.
    """

    def __init__(
        self,
        model: LoadedModel,
        parts: Parts,
        answers: dict[str, Answer],
    ) -> None:
        scheduler, runner, self._prefix_disk, self._eyes = parts
        config, kv = scheduler.config, scheduler.kv
        self.inputs = InputBatch(
            config.max_num_seqs, scheduler.max_model_len, config.block_size, len(kv.groups)
        )
        self.pipeline = Pipeline[SchedulerOutput](runner, self.inputs)
        self.seats = Seats(self.inputs, runner.sampler, model.eos_token_ids)
        self.constraints = Constraints(model.vocab_size)
        self.pooling = PoolingTable()
        self.model_drafts = ModelDrafts(
            runner,
            self.inputs,
            self.seats,
            self.constraints,
            self._eyes,
            config.max_num_batched_tokens,
        )
        # Each rank measures its own times, so ranks would choose different drafts.
        self.speculator = None
        if config.speculate != "off" and model.ranks.size == 1:
            draft = None if runner.drafter is None else self.model_drafts.draft
            most = config.num_speculative_tokens
            self.speculator = Speculator(self.seats.tokens_of, draft, most)
        self._scheduler, self._answers = scheduler, answers
        self._last_end: float | None = None  # when the last step ended, while there is work

    @property
    def outputs(self) -> list[SchedulerOutput]:
        """The schedules of the steps in flight, oldest first.  The last may not be launched yet,
        if its schedule was interrupted, perhaps while its drafts were made."""
        outputs, last = [step.scheduled for step in self.pipeline.steps], self._scheduler.unlaunched
        return outputs if last is None or last.is_empty else [*outputs, last]

    @property
    def propose(self) -> Propose | None:
        """Makes the drafts of a step for `Scheduler.schedule`; None: there are none."""
        return None if self.speculator is None else self._propose

    def _propose(self, segments: Sequence[tuple[Segment, int]]) -> list[list[int]]:
        """The drafts of segments (`scheduler.drafts`), within the requests' constraints."""
        assert self.speculator is not None, "without a speculator, no step has drafts"
        self.seats.take_blocks([segment for segment, _ in segments])
        wanted = [(segment.request, most) for segment, most in segments]
        if self.pipeline.runner.drafter is None:  # perhaps since drafting has failed
            self.speculator.max_model_drafts = 0
        drafts = self.speculator.propose(wanted)
        if not any(drafts):  # forced tokens alone stay a chunk, which need not wait for tokens
            return drafts
        return [
            self.constraints.continued(request, draft, most)
            for (request, most), draft in zip(wanted, drafts, strict=True)
        ]

    def draft_ahead(self) -> None:
        """Have the device draft behind the step in flight, if the next step will want that."""
        (step,), runner = self.pipeline.steps, self.pipeline.runner
        if self.speculator is None or runner.drafter is None or not runner.attention.overlaps:
            return
        requests = [r for r in step.scheduled.terminal if r in self.seats.req_index]
        if num_drafts := self.speculator.num_ahead(requests):
            self.model_drafts.draft_ahead(step, requests, num_drafts)

    def wants_drafts(self) -> bool:
        """Whether the next step should wait for the tokens in flight, to have drafts."""
        if self.speculator is None or not self._scheduler.drafts.has_room:
            return False
        return self.speculator.wants(self._scheduler.decodes)

    def launch(self, output: SchedulerOutput) -> None:
        """Submit a step; its requests may continue from tokens that the step in flight is still
        sampling.  A step that fails here is in flight, too, until `rollback`."""
        for request in output.preempted:
            self.seats.remove(request)
        self._scheduler.unlaunched = None
        if output.is_empty:
            return
        output.launched_at = time.monotonic()
        self.pipeline.begin(output)
        for request in output.admitted:
            answer = self._answers[request.request_id]
            self.seats.add(answer)
            answer.report_cached(self._prefix_disk.restored_tokens(request))
        batch = self.seats.pack(output)
        self._choose_to_follow(output)  # behind `pack`, which puts blocks into the table
        self.model_drafts.step_begins()
        batch = self.pooling.extend(batch, [s.request for s in output.segments])
        batch = with_pictures(batch, [s.request.pictures for s in output.segments], self._eyes)
        scored = 0
        if len(batch.prompt_targets):
            asked = (self._answers[s.request.request_id].params for s in output.segments)
            scored = max(params.prompt_logprobs or 0 for params in asked)
        requests = [output.segments[i].request for i in batch.sample_segments]
        masks = None
        if any(request in self.constraints for request in requests):
            masks = partial(self._masks, requests, batch.draft_token_ids.tolist())
        self.pipeline.launch(batch, scored, masks)

    def _choose_to_follow(self, output: SchedulerOutput) -> None:
        """Decide whether the drafter follows the step.  A draft model leaves out decodes that are
        launched ahead, and catches up later.  A head leaves them out only while none of its drafts
        are expected."""
        drafter, speculator = self.pipeline.runner.drafter, self.speculator
        if drafter is not None and speculator is not None:
            ahead = len(self.pipeline.steps) > 1 and output.num_decodes == len(output.segments)
            soon = drafter.takes_hidden and speculator.expects_drafts
            drafter.follows = not ahead or soon
            self.model_drafts.catch_up(output)

    def _masks(self, requests: list[Request], drafts: list[int]) -> TokenMasks | None:
        """The tokens that constraints allow in the rows of a step that is being launched."""
        if len(self.pipeline.steps) > 1:
            self.constraints.accept(self.pipeline.steps[0].scheduled, self.pipeline.steps[0].result)
        return self.constraints.masks(requests, drafts)

    def advance(self) -> None:
        """Make room for the tokens of the oldest step; the next one can then be launched."""
        output = self.pipeline.steps[0].scheduled
        ended = self._scheduler.advance(output, self.constraints.take_forced())
        self.pipeline.advance()
        for request, token_ids in output.forced:
            self.constraints.accept_forced(request, token_ids)
            self.seats.force(self._answers[request.request_id], token_ids)
        for request in ended:
            self.seats.remove(request)

    def finish(self) -> StepInFlight[SchedulerOutput]:
        """Wait for the oldest step; a failure leaves it in flight."""
        self.constraints.accept(self.pipeline.steps[0].scheduled, self.pipeline.steps[0].result)
        return self.pipeline.finish()

    def record(self, step: StepInFlight[SchedulerOutput]) -> None:
        """Tell the scheduler and the sampler the tokens of a finished step."""
        output, result = step.scheduled, step.result
        tokens = result.token_ids.tolist()
        output.seconds = result.ended_at - (self._last_end or output.launched_at)
        self._last_end = result.ended_at
        live, drawn = result.live_rows, dict[Request, list[int]]()
        if output.has_drafts:
            for request, rows in zip(output.terminal, live, strict=True):
                drawn[request] = [tokens[row] for row in rows if row not in result.no_token]
        self.model_drafts.step_ended(step)
        accepted = {request: known[1:] for request, known in drawn.items()}
        firsts = (UNKNOWN_TOKEN if r.start in result.no_token else tokens[r.start] for r in live)
        self._scheduler.update(output, list(firsts), accepted)
        forced = {request for request, _ in output.forced}  # the sampler knows their tokens
        for request, known in drawn.items():
            if request not in forced:
                self.seats.accept(request, known)
        counts = [len(accepted[s.request]) for s in output.segments if s.draft_token_ids]
        if self.speculator is not None:
            typical = output.has_drafts or self._is_typical(step)
            self.speculator.record(output, counts, output.seconds if typical else None)
        if self._scheduler.limit is not None:
            self._scheduler.limit.record(output)

    def _is_typical(self, step: StepInFlight[SchedulerOutput]) -> bool:
        """Whether a finished step without drafts took as long as others between such steps: it was
        launched ahead, launched the next one ahead, and the drafter does not follow."""
        drafter = self.pipeline.runner.drafter
        is_inner = step.is_ahead and len(self.pipeline.steps) > 0
        is_followed = drafter is not None and drafter.follows
        return self.pipeline.num_ahead == 0 or (is_inner and not is_followed)

    def pause(self) -> None:
        """No request is left, so the time until the next step is not a part of that step."""
        self._last_end = None

    def remove(self, request: Request) -> None:
        """Release the seat of a request that ends, and all else that is kept for its steps."""
        self.constraints.remove(request)
        self.pooling.remove(request)
        self.seats.remove(request)

    def works(self, answer: Answer) -> bool:
        """Whether a step of this new request alone succeeds, or finds no room.  Nothing stays."""
        request, scheduler = answer.request, self._scheduler
        self._answers[request.request_id] = answer
        scheduler.add(request)
        scheduler.suspects[request] = 0
        try:
            output = scheduler.schedule_alone([request])
            self.launch(output)
            if not output.is_empty:
                self.advance()
                self.finish()
        except Exception as e:
            self.rollback()
            return isinstance(e, StatesLost)
        finally:
            scheduler.finish(request)
            self.seats.remove(request)
            del self._answers[request.request_id]
        return True

    def rollback(self) -> None:
        """Undo all steps; their requests return to the queue."""
        outputs = self.outputs
        if (unlaunched := self._scheduler.unlaunched) is not None:
            self._scheduler.unlaunched = None
            for request in unlaunched.preempted:
                self.seats.remove(request)
        self.pipeline.clear()
        self.pipeline.runner.forget()
        for output in outputs:
            for segment in output.segments:
                self.seats.remove(segment.request)
        self.model_drafts.forget()
        self._scheduler.rollback(*outputs)
        self.constraints.rollback()
