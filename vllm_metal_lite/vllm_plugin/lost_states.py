"""Computes recurrent states again from the tokens, after a step that failed.

States change in place, and vLLM cannot go back to an earlier step as the embedded engine can.
"""

import numpy as np

from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, ForwardBatch
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.batch.segment_state import SegmentState
from vllm_metal_lite.runner.runner import ModelRunner


def recompute_states(
    runner: ModelRunner, inputs: InputBatch, batch: ForwardBatch, max_tokens: int
) -> None:
    """Restore the states that the segments of a failed step start from.

    Only segments that write the slot they start from need this.  The blocks of their tokens get the
    same K and V again.  max_tokens: of a step.
    """
    starts = batch.seq_lens - np.diff(batch.cu_seqlens_q)
    for segment in np.flatnonzero((batch.initial_slots == batch.final_slots) & (starts > 0)):
        slot, seat = int(batch.final_slots[segment]), batch.req_indices[segment : segment + 1]
        for done in range(0, int(starts[segment]), max_tokens):
            count = min(max_tokens, int(starts[segment]) - done)
            slots = SegmentState(slot if done else EMPTY_SLOT, slot)
            chunk = inputs.pack(seat, np.array([done]), np.array([count]), [slots])
            runner.execute(chunk)
