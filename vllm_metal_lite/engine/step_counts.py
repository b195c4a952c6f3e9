"""Counts the tokens of completed steps."""

from dataclasses import dataclass

from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput


@dataclass(slots=True)
class StepCounts:
    """See `LLMEngine.metrics`."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    forced_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, output: SchedulerOutput, num_accepted: int, num_dropped: int) -> None:
        """num_accepted: drafts that became tokens of an answer.  num_dropped: decodes of answers
        that ended while the step was in flight."""
        prefills = output.segments[output.num_decodes :]
        again = sum(s.num_computed >= s.request.num_prompt_tokens for s in prefills)
        decodes = output.num_decodes + again  # again: resumed past the prompt, after preemption
        drafts = sum(len(s.draft_token_ids) for s in prefills)
        self.steps += 1
        self.forced_tokens += sum(len(token_ids) for _, token_ids in output.forced)
        self.draft_tokens += drafts
        self.accepted_tokens += num_accepted
        self.decode_tokens += decodes - num_dropped + num_accepted
        self.prefill_tokens += output.total_num_scheduled_tokens - decodes - drafts
