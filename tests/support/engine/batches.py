"""The ForwardBatch of one step, by the real InputBatch, for tests without a scheduler.

For several steps of the same requests there are `RunnerBench` and conformance's `Bench`.
"""

from collections.abc import Sequence

import numpy as np

from vllm_metal_lite.batch.forward_batch import ForwardBatch, SegmentState
from vllm_metal_lite.batch.input_batch import InputBatch

Segment = tuple[int, int]  # tokens computed before, tokens of this step


def pack(
    segments: Sequence[Segment],
    *tables: Sequence[Sequence[int]],
    block_size: int = 8,
    tokens: Sequence[int] | None = None,
    states: Sequence[SegmentState] | None = None,
) -> ForwardBatch:
    """A step that ends with the last known token of each request.

    tables: for each KV group the blocks of each segment, or more blocks; by default `own_blocks`.
    tokens: the first tokens of all requests; by default zeros.
    """
    longest = max(before + count for before, count in segments)
    tables = tables or (own_blocks(segments, block_size),)
    inputs = InputBatch(len(segments), longest, block_size, len(tables))
    known, rows = [0] * longest if tokens is None else tokens, []
    for (before, count), *blocks in zip(segments, *tables, strict=True):
        end = before + count
        rows.append(inputs.add(known[:end], end))
        inputs.append_blocks(rows[-1], *(table[: -(-end // block_size)] for table in blocks))
    before, count = np.array(segments).T
    return inputs.pack(np.array(rows), before, count, states)


def own_blocks(segments: Sequence[Segment], block_size: int, seed: int = 0) -> list[list[int]]:
    """The blocks of each segment, in random order."""
    counts = [-(-(before + count) // block_size) for before, count in segments]
    blocks = np.random.default_rng(seed).permutation(sum(counts)).tolist()
    return [[blocks.pop() for _ in range(count)] for count in counts]
