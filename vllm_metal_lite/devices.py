"""Performance numbers of each device: the only file to edit after a measurement.

The numbers here affect speed, not results.  Metal's own limits (threadgroup memory, head sizes,
tiles) stay with their kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_metal_lite import backend


@dataclass(frozen=True)
class DeviceProfile:
    """One backend's numbers.

    Kernels:
    decode_fill: threadgroups of `paged_decode` that keep the device busy; with fewer, contexts are
        cut into splits.
    min_split_context: tokens, the shortest context worth splitting, as splits must be merged.
    min_split_keys: keys, the fewest in a split.
    few_keys: keys, the largest split that gets a smaller threadgroup.
    prefix_fill: threadgroups of `shared_prefix` that keep the device busy.  Each uses more memory
        than one of `paged_decode`, and waits for one tile of keys at a time.
    min_prefix_split_keys: keys, the fewest in a split of a shared prefix.
    rope_many_rows: rows from which a simdgroup of `rope_write` handles several heads.  With fewer
        rows, parallelism is worth more than sharing a sine between heads.
    gemm_fill: threadgroups of `skinny_gemm`, of 8 simdgroups each, that keep the device busy.
    max_lane_rows: the most rows that `skinny_gemm` multiplies with quantised weights without
        matrices, at most 4.
    max_normed_rows: the most rows that each threadgroup of `skinny_gemm` normalises by itself.
    max_normed_weights: the most values of a quantised weight beside which it does so.  The norm
        costs instructions for each value, and products in few bits have none to spare.
    argmax_fill: rows of logits from which MLX's argmax, one threadgroup per row, needs no parts.
    argmax_long: vocabulary size from which argmax in parts repays its launches.

    Decodes that share a prefix:
    min_saved_tokens: tokens, the least saving in reads that repays one launch per layer.
    min_saved_for_prompts: the same when rows of prompts are attended to as decodes.
    prefix_row_cost: cost of a row in `shared_prefix`, with or without the prefix, as a fraction of
        reading the prefix.

    Prompts:
    rows_as_decodes: rows, the largest step whose prompt rows are attended to as decodes.  Launches
        cost such a step more than reading keys several times.
    max_own_keys: keys, the most that these rows may read beyond their shared prefix, in total.
    small_rows: rows of prompts beside decodes, the most for a step that is padded to repeating
        shapes and compiled.
    small_scores: scores of a head, the most for such a step where MLX's SDPA serves larger prompts
        faster than `varlen_prefill`.
    min_keys: the least keys of such a step after padding, so that a prompt's first chunks have one
        shape.

    MLX's SDPA, which the reference uses:
    sdpa_tile: query rows, the most in a tile.  An unfused SDPA also computes the scores that
        "causal" hides.
    sdpa_call_cost: the time of one more call, in scores computed.
    key_cost: the time to copy one key out of the store, in scores computed.
    max_gathered_keys: keys, the most that one call gathers, so that its copy of K and V stays small
        beside the store.
    max_scores: of all heads, the most that one call keeps in memory if MLX does not fuse it.

    Steps:
    row_grains: (rows, grain) pairs: a step of up to `rows` rows is padded to a multiple of `grain`;
        a grain of 0 means the next power of two.  The last pair has no limit.
    memory_fraction: default fraction of `backend.memory_limit()` to use.
    profile_rows: rows, the most in the step that measures peak memory at start; the result is
        scaled up for larger steps.
    profile_context: tokens, the longest context of that step.
    """

    decode_fill: int
    min_split_context: int
    min_split_keys: int
    few_keys: int
    prefix_fill: int
    min_prefix_split_keys: int
    rope_many_rows: int
    gemm_fill: int
    max_lane_rows: int
    max_normed_rows: int
    max_normed_weights: int
    argmax_fill: int
    argmax_long: int
    min_saved_tokens: int
    min_saved_for_prompts: int
    prefix_row_cost: float
    rows_as_decodes: int
    max_own_keys: int
    small_rows: int
    small_scores: int
    min_keys: int
    sdpa_tile: int
    sdpa_call_cost: int
    key_cost: int
    max_gathered_keys: int
    max_scores: int
    row_grains: tuple[tuple[int, int], ...]
    memory_fraction: float
    profile_rows: int
    profile_context: int


_ANY = 1 << 30  # as rows or tokens: no limit

# No Mac has been measured: most guesses are copied from the H200.
METAL = DeviceProfile(
    decode_fill=128,  # guessed
    min_split_context=1024,  # guessed
    min_split_keys=256,  # guessed
    few_keys=512,  # guessed
    prefix_fill=128,  # guessed
    min_prefix_split_keys=128,  # guessed
    rope_many_rows=256,  # guessed
    gemm_fill=128,  # guessed
    max_lane_rows=4,  # guessed, by counting instructions
    max_normed_rows=16,  # guessed
    max_normed_weights=1 << 21,  # guessed
    argmax_fill=128,  # guessed
    argmax_long=1 << 16,  # guessed
    min_saved_tokens=8192,  # guessed
    min_saved_for_prompts=8192,  # guessed
    prefix_row_cost=1 / 8,  # guessed
    rows_as_decodes=64,  # guessed
    max_own_keys=1 << 14,  # guessed
    small_rows=768,  # guessed: a chunk of 512, padded
    small_scores=768 * 8192,  # guessed: that chunk at a context of 8k
    min_keys=1024,  # guessed
    sdpa_tile=_ANY,  # fused: nothing to save
    sdpa_call_cost=1 << 21,  # guessed
    key_cost=64,  # guessed
    max_gathered_keys=1 << 17,  # guessed
    max_scores=1 << 26,  # guessed: 128 MiB in 16 bits, and up to three times that for sinks
    row_grains=((64, 0), (512, 64), (_ANY, 256)),  # guessed: MLX reuses buffers only of like size
    memory_fraction=0.9,  # guessed
    profile_rows=_ANY,
    profile_context=4096,  # guessed
)

# An H200 (docs/benchmarks.md).
CUDA = DeviceProfile(
    decode_fill=256,  # measured, 132 cores
    min_split_context=1024,  # guessed
    min_split_keys=256,  # guessed
    few_keys=512,  # guessed
    prefix_fill=512,  # guessed
    min_prefix_split_keys=128,  # guessed
    rope_many_rows=256,  # guessed
    gemm_fill=128,  # measured
    max_lane_rows=0,  # guessed: products of tensor cores are cheap
    max_normed_rows=16,  # measured
    max_normed_weights=1 << 24,  # guessed
    argmax_fill=128,  # guessed
    argmax_long=1 << 16,  # guessed
    min_saved_tokens=1 << 14,  # measured
    min_saved_for_prompts=8192,  # measured
    prefix_row_cost=1 / 8,  # guessed
    rows_as_decodes=64,  # measured with this limit only
    max_own_keys=1 << 14,  # guessed
    small_rows=768,  # guessed: a chunk of 512, padded
    small_scores=768 * 8192,  # guessed: that chunk at a context of 8k
    min_keys=1024,  # guessed
    sdpa_tile=_ANY,  # fused: nothing to save
    sdpa_call_cost=1 << 21,  # measured: the host's time for a call, in scores of 16 heads
    key_cost=64,  # guessed
    max_gathered_keys=1 << 17,  # guessed
    max_scores=1 << 29,  # measured: launches cost CUDA's host so much that few, large calls win
    row_grains=((64, 0), (512, 64), (_ANY, 256)),  # guessed: MLX reuses buffers only of like size
    memory_fraction=0.6,  # CUDA takes 30 GB more; on a full GPU steps were seen to stall
    profile_rows=_ANY,
    profile_context=1 << 14,  # guessed: a chunk of 2,048 rows of 16 heads reaches max_scores there
)

# Kernels run on a CPU only in tests, where speed does not matter.  Their numbers are a GPU's, or
# small enough for tests to reach every case.
CPU = DeviceProfile(
    decode_fill=16,
    min_split_context=1024,
    min_split_keys=256,
    few_keys=512,
    prefix_fill=16,
    min_prefix_split_keys=128,
    rope_many_rows=256,
    gemm_fill=128,
    max_lane_rows=4,
    max_normed_rows=16,
    max_normed_weights=1 << 21,
    argmax_fill=128,  # unused: a CPU's argmax has no parts
    argmax_long=1 << 16,
    min_saved_tokens=8192,
    min_saved_for_prompts=8192,
    prefix_row_cost=1 / 8,
    rows_as_decodes=64,
    max_own_keys=1 << 14,
    small_rows=768,
    small_scores=768 * 8192,
    min_keys=1024,
    sdpa_tile=256,  # measured on 2 cores: `exp` dominates, half of a causal square is wasted
    sdpa_call_cost=1 << 13,  # measured on 2 cores
    key_cost=64,  # measured on 2 cores: 1.3 us a key, 13 ns a score
    max_gathered_keys=1 << 17,  # guessed
    max_scores=1 << 26,  # guessed: 128 MiB in 16 bits, and up to three times that for sinks
    row_grains=((_ANY, 1),),  # padded rows cost as much as real rows; buffers are free
    memory_fraction=0.4,  # guessed: the limit is all memory, which other processes share
    profile_rows=64,  # a full step takes seconds; scaling up a part is conservative
    profile_context=4096,  # guessed
)

PROFILES = {"metal": METAL, "cuda": CUDA, "cpu": CPU}


def profile() -> DeviceProfile:
    """The profile of MLX's current backend."""
    return PROFILES[backend.name()]


@contextmanager
def using(changed: DeviceProfile) -> Iterator[None]:
    """While open, `profile` gives another profile."""
    name, before = backend.name(), profile()
    PROFILES[name] = changed
    try:
        yield
    finally:
        PROFILES[name] = before
