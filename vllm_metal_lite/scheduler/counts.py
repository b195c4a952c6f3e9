"""What the scheduler did and holds, as numbers by name."""

from dataclasses import asdict

from vllm_metal_lite.scheduler.scheduler import Scheduler


def count(scheduler: Scheduler) -> dict[str, int]:
    """Counters since the scheduler was created, and the present counts of requests and blocks.

    *_tokens: see TokenCounts.
    state_*: slots of recurrent states; cached ones are checkpoints.
    blocks_*: of the first KV group; blocks_*_window_N: of each other group, by its window of N
    tokens.
    """
    blocks = {}
    if (states := scheduler.kv.states) is not None:
        blocks["state_slots_total"] = states.pool.num_blocks
        blocks["state_slots_free"] = states.pool.num_free
        blocks["state_slots_cached"] = states.pool.num_cached
        blocks["state_slots_owned"] = states.pool.num_owned
        blocks["state_checkpoints_taken"] = states.num_taken
        blocks["state_checkpoints_evicted"] = states.pool.num_evicted
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
