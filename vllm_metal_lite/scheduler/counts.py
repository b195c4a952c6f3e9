"""What the scheduler did and holds, as numbers by name."""

from dataclasses import asdict, dataclass

from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput


@dataclass(slots=True)
class StepCounts:
    """Tokens of completed steps; see `LLMEngine.metrics`."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    forced_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, output: SchedulerOutput, num_new: int, num_accepted: int) -> None:
        """num_new: tokens of answers, without first ones.  num_accepted: drafts among these."""
        chunks = output.segments[output.num_decodes :]
        self.steps += 1
        self.forced_tokens += sum(len(token_ids) for _, token_ids in output.forced)
        self.draft_tokens += sum(len(s.draft_token_ids) for s in chunks)
        self.accepted_tokens += num_accepted
        self.decode_tokens += num_new
        self.prefill_tokens += sum(s.num_scheduled for s in chunks if s.is_prompt)


def count(scheduler: Scheduler) -> dict[str, int]:
    """Counters since the scheduler was created, and the present counts of requests and blocks.

    *_tokens: see TokenCounts.
    state_*: slots of recurrent states; cached ones are checkpoints.
    blocks_*: of the first KV group; blocks_*_window_N: of each other group, by its window of N
    tokens.
    """
    blocks = {}
    if (states := scheduler.kv.states) is not None:
        blocks["state_slots_total"] = states.num_blocks
        blocks["state_slots_free"] = states.num_free
        blocks["state_slots_cached"] = states.num_cached
        blocks["state_slots_owned"] = states.num_owned
        blocks["state_checkpoints_taken"] = states.num_taken
        blocks["state_checkpoints_evicted"] = states.num_evicted
    for i, (group, pool) in enumerate(zip(scheduler.kv.groups, scheduler.kv.pools, strict=True)):
        kind = f"_window_{group.window}" if i else ""
        blocks[f"blocks_total{kind}"] = pool.num_blocks
        blocks[f"blocks_free{kind}"] = pool.num_free
        blocks[f"blocks_cached{kind}"] = pool.num_cached
        blocks[f"blocks_owned{kind}"] = pool.num_owned
        blocks[f"blocks_peak_owned{kind}"] = pool.peak_owned
    return {
        **asdict(scheduler.counts),
        "preemptions": scheduler.num_preemptions,
        "requests_running": scheduler.num_running,
        "requests_waiting": len(scheduler.waiting),
        **blocks,
    }
