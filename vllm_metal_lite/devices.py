"""What depends on how fast a device is, and at what: the one file to edit when one is measured.

Nothing here decides what is right, only what is fast.  Limits of Metal itself (threadgroup memory,
head sizes, tiles) stay with their kernels.
"""

from dataclasses import dataclass

from vllm_metal_lite import backend


@dataclass(frozen=True)
class DeviceProfile:
    """One backend's numbers.

    Kernels:
    decode_fill: threadgroups of `paged_decode` that keep the device busy; with fewer, contexts are
        cut into splits.
    min_split_context: tokens, the shortest context that is worth cutting, for parts are merged.
    min_split_keys: keys, fewest of a split.
    few_keys: keys, a split of up to so many gets a smaller threadgroup.
    prefix_fill: threadgroups of `shared_prefix` that keep the device busy.  They hold more memory
        than those of `paged_decode`, and each waits for a tile of keys at a time.
    min_prefix_split_keys: keys, fewest of a split of a shared prefix.
    rope_many_rows: rows from which a simdgroup of `rope_write` takes several heads: with fewer,
        spreading the work is worth more than computing a sine once for several heads.
    gemm_fill: threadgroups of `skinny_gemm`, of 8 simdgroups each, that keep the device busy.
    max_normed_rows: rows up to which each threadgroup of `skinny_gemm` normalises all of them.
    argmax_fill: rows of logits from which MLX's argmax, a threadgroup a row, needs no parts.
    argmax_long: tokens of a vocabulary from which argmax in parts pays for its launches.

    Decodes that share a prefix:
    min_saved_tokens: tokens that must not be read again to make up for a launch a layer.
    min_saved_for_prompts: the same for rows of prompts, of which it makes decodes.
    prefix_row_cost: what a row costs there whether it has the prefix or not, as a share of reading
        the prefix.

    Prompts:
    rows_as_decodes: rows of a step, up to which rows of prompts are attended to as decodes: such
        steps wait for launches more than for keys that several rows read.
    max_own_keys: keys that these rows may read, each for itself, beside the prefix they share.
    small_rows: rows of prompts beside decodes, up to which a step is padded to shapes that repeat
        and compiled.
    small_mask: entries of the mask of such a step, at most.
    min_keys, min_segment_rows: keys of such a step and rows of a segment, padded to these at least,
        so that a prompt's first chunks are of one shape.

    MLX's SDPA, by which the reference attends:
    sdpa_tile: query rows of a tile, at most.  An unfused SDPA computes what "causal" hides.
    sdpa_call_cost: scores that are computed in the time of one more call.
    key_cost: scores that are computed in the time of copying one key out of the store.
    max_gathered_keys: keys that one call gathers at most, so that its copy of K and V stays small
        beside the store.

    Steps:
    row_grains: (rows, grain) pairs: a step of up to so many rows is padded to a multiple of the
        grain; a grain of 0 is the next power of two.  The last pair has no limit.
    memory_fraction: share of `backend.memory_limit()` that is used unless the user says otherwise.
    profile_rows: rows of the step whose peak memory is measured at start, at most; larger steps
        are scaled up from it.
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
    max_normed_rows: int
    argmax_fill: int
    argmax_long: int
    min_saved_tokens: int
    min_saved_for_prompts: int
    prefix_row_cost: float
    rows_as_decodes: int
    max_own_keys: int
    small_rows: int
    small_mask: int
    min_keys: int
    min_segment_rows: int
    sdpa_tile: int
    sdpa_call_cost: int
    key_cost: int
    max_gathered_keys: int
    row_grains: tuple[tuple[int, int], ...]
    memory_fraction: float
    profile_rows: int
    profile_context: int


_ANY = 1 << 30  # as rows or tokens: no limit

# No Mac was measured yet: most guesses are what was found on an H200.
METAL = DeviceProfile(
    decode_fill=128,  # guessed
    min_split_context=1024,  # guessed
    min_split_keys=256,  # guessed
    few_keys=512,  # guessed
    prefix_fill=128,  # guessed
    min_prefix_split_keys=128,  # guessed
    rope_many_rows=256,  # guessed
    gemm_fill=128,  # guessed
    max_normed_rows=16,  # guessed
    argmax_fill=128,  # guessed
    argmax_long=1 << 16,  # guessed
    min_saved_tokens=8192,  # guessed
    min_saved_for_prompts=8192,  # guessed
    prefix_row_cost=1 / 8,  # guessed
    rows_as_decodes=64,  # guessed
    max_own_keys=1 << 14,  # guessed
    small_rows=768,  # guessed: a chunk of 512, padded
    small_mask=768 * 8192,  # guessed: that chunk at a context of 8k
    min_keys=1024,  # guessed
    min_segment_rows=64,  # guessed
    sdpa_tile=_ANY,  # fused: nothing to save
    sdpa_call_cost=1 << 21,  # guessed
    key_cost=64,  # guessed
    max_gathered_keys=1 << 17,  # guessed
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
    max_normed_rows=16,  # measured
    argmax_fill=128,  # guessed
    argmax_long=1 << 16,  # guessed
    min_saved_tokens=1 << 14,  # measured
    min_saved_for_prompts=8192,  # measured
    prefix_row_cost=1 / 8,  # guessed
    rows_as_decodes=64,  # measured with this limit only
    max_own_keys=1 << 14,  # guessed
    small_rows=768,  # guessed: a chunk of 512, padded; larger chunks are for SDPA without a mask
    small_mask=768 * 8192,  # guessed: that chunk at a context of 8k
    min_keys=1024,  # guessed
    min_segment_rows=64,  # guessed
    sdpa_tile=_ANY,  # fused: nothing to save
    sdpa_call_cost=1 << 21,  # measured: the host's time for a call, in scores of 16 heads
    key_cost=64,  # guessed
    max_gathered_keys=1 << 17,  # guessed
    row_grains=((64, 0), (512, 64), (_ANY, 256)),  # guessed: MLX reuses buffers only of like size
    memory_fraction=0.9,  # guessed
    profile_rows=_ANY,
    profile_context=4096,  # guessed
)

# Kernels run on a CPU in tests only, where time means nothing: their numbers are small enough that
# tests meet every case, or those of a GPU.
CPU = DeviceProfile(
    decode_fill=16,
    min_split_context=1024,
    min_split_keys=256,
    few_keys=512,
    prefix_fill=16,
    min_prefix_split_keys=128,
    rope_many_rows=256,
    gemm_fill=128,
    max_normed_rows=16,
    argmax_fill=128,  # a CPU's argmax is never in parts
    argmax_long=1 << 16,
    min_saved_tokens=8192,
    min_saved_for_prompts=8192,
    prefix_row_cost=1 / 8,
    rows_as_decodes=64,
    max_own_keys=1 << 14,
    small_rows=768,
    small_mask=768 * 8192,
    min_keys=1024,
    min_segment_rows=64,
    sdpa_tile=256,  # measured on 2 cores: `exp` dominates, half of a causal square is for nothing
    sdpa_call_cost=1 << 13,  # measured on 2 cores
    key_cost=64,  # measured on 2 cores: 1.3 us a key, 13 ns a score
    max_gathered_keys=1 << 17,  # guessed
    row_grains=((_ANY, 1),),  # a padded row costs as much as a real one, and buffers cost nothing
    memory_fraction=0.4,  # guessed: the limit is all of the machine's memory, which others use too
    profile_rows=64,  # a full step takes seconds; a part of it, scaled up, errs on the safe side
    profile_context=4096,  # guessed
)

PROFILES = {"metal": METAL, "cuda": CUDA, "cpu": CPU}


def profile() -> DeviceProfile:
    """The profile of the backend that MLX computes on."""
    return PROFILES[backend.name()]
