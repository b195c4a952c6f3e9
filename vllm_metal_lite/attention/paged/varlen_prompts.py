"""The prompts of a step, arranged for kernels that read the store in place."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from vllm_metal_lite.attention.step_arrays import pad_rows, upload_padded, upload_tables
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, power_of_two
from vllm_metal_lite.kernels.prefill import TILE_ROWS, VarlenMetadata


class VarlenPrompts(NamedTuple):
    """For `varlen_prefill`, or `latent_attention`: block_tables (S, W) per KV group, cu_seqlens_q
    (S+1,), seq_lens (S,).

    S (at least MIN_ELEMENTS) and W are powers of two; padded segments have no rows.  tiles: query
    heads per KV head -> the tiles of such layers.  repeats: see StepPlan.
    """

    block_tables: tuple[mx.array, ...]
    cu_seqlens_q: mx.array
    seq_lens: mx.array
    tiles: dict[int, mx.array]
    repeats: bool

    @classmethod
    def plan(
        cls, batch: ForwardBatch, num_rows: int, queries_per_kv: Collection[int], repeats: bool
    ) -> "VarlenPrompts":
        """num_rows: rows of prompts, including padding.  queries_per_kv: query heads per KV head,
        over all layers."""
        segments = max(power_of_two(batch.num_segments), MIN_ELEMENTS)
        longest = max(int(batch.seq_lens.max()), profile().min_keys)
        width = power_of_two(-(-longest // batch.block_size))
        cu_seqlens_q = pad_rows(batch.cu_seqlens_q, segments + 1, batch.num_tokens)
        return cls(
            tuple(upload_tables(t, segments, width) for t in batch.block_tables),
            mx.array(cu_seqlens_q),
            upload_padded(batch.seq_lens, segments),
            {g: mx.array(plan_tiles(cu_seqlens_q, num_rows, g)) for g in sorted(queries_per_kv)},
            repeats,
        )

    def metadata(self, group: int, queries_per_kv: int) -> VarlenMetadata:
        """The prompts for layers of a KV group with this number of query heads per KV head."""
        tables, tiles = self.block_tables[group], self.tiles[queries_per_kv]
        return VarlenMetadata(tables, self.cu_seqlens_q, self.seq_lens, tiles)


def plan_tiles(cu_seqlens_q: np.ndarray, num_rows: int, num_queries_per_kv: int) -> np.ndarray:
    """Split a packed batch into tiles (T, 2) int32 for `varlen_prefill`, vectorised over segments.

    cu_seqlens_q: (S+1,), empty segments allowed.  num_rows: rows of q, padding included.
    num_queries_per_kv: query heads per KV head.  A tile is (segment, first of its TILE_ROWS (row,
    head) pairs in the segment).  Padding rows are in tiles of segment -1, which give zeros; their
    first pair counts from row 0.

    T depends only on S, num_rows and num_queries_per_kv.  The last rows of a segment come first:
    they see the most keys, and tiles that start last should be short.
    """
    used = int(cu_seqlens_q[-1])
    pairs = np.append(np.diff(cu_seqlens_q), num_rows - used).astype(np.int64) * num_queries_per_kv
    counts = -(-pairs // TILE_ROWS)
    total = num_rows * num_queries_per_kv // TILE_ROWS + len(counts)
    ends = np.cumsum(counts)
    tiles = np.empty((total, 2), np.int32)
    tiles[ends[-1] :] = -1, num_rows * num_queries_per_kv  # past all rows: nothing to do
    real = tiles[: ends[-1]]
    real[:, 0] = np.repeat(np.arange(len(counts)), counts)
    real[:, 1] = (np.repeat(ends, counts) - 1 - np.arange(ends[-1])) * TILE_ROWS
    rest = real[:, 0] == len(counts) - 1
    real[rest] += np.array([-len(counts), used * num_queries_per_kv], np.int32)
    return tiles
