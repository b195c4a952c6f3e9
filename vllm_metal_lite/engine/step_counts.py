"""Counts the tokens of completed steps."""

from dataclasses import dataclass

from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput


@dataclass(slots=True)
class StepCounts:
    """forced_tokens: known without sampling; those computed in chunks are prefill_tokens too."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    forced_tokens: int = 0

    def add(self, output: SchedulerOutput, num_more: int) -> None:
        """num_more: decoded tokens beyond one per decode."""
        prefills = output.segments[output.num_decodes :]
        again = sum(s.num_computed >= s.request.num_prompt_tokens for s in prefills)
        decodes = output.num_decodes + again  # again: resumed past the prompt, after preemption
        drafts = sum(len(s.draft_token_ids) for s in prefills)
        self.steps += 1
        self.decode_tokens += decodes + num_more
        self.prefill_tokens += output.total_num_scheduled_tokens - decodes - drafts
