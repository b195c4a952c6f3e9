"""Performance numbers of each device: the only file to edit after a measurement.

The numbers here affect speed, not results.  Limits of shapes and tiles are in kernels/.
"""

from dataclasses import dataclass

from vllm_metal_lite import backend

_ANY = 1 << 30  # no limit of rows or tokens


@dataclass(frozen=True)
class DeviceProfile:
    """One backend's numbers.  The defaults are Metal's.

    No Mac has been measured, so all defaults are guesses; most are copied from the H200.
    """

    # Kernels

    # Threadgroups of `paged_decode` that keep the device busy; with fewer, contexts are cut into
    # splits.
    decode_fill: int = 128
    # Tokens: the shortest context worth splitting, as splits must be merged.
    min_split_context: int = 1024
    # The fewest keys in a split; the most keys in a split that gets a smaller threadgroup.
    min_split_keys: int = 256
    few_keys: int = 512
    # The most floats of sums in a lane of `paged_decode` (a group of more query heads takes several
    # threadgroups), and the most with which a lane loads four keys at once, not two.
    # Mesa's compiler for Apple GPUs has no registers for more (docs/agx.md).
    decode_sums: int = 32
    decode_sums_of_four: int = 16
    # The most simdgroups of a threadgroup of `latent_attention`: with 8, the queries and sums of
    # 512 columns leave a lane of Apple's GPUs no registers.
    latent_simdgroups: int = 16
    # Registers of 16 bits for the queries and sums of a lane of `varlen_prefill` and
    # `shared_prefix`; a lane of Apple's GPUs has 256 for everything.  If a head needs more, two
    # simdgroups share its rows.
    prefill_registers: int = 160
    # Threadgroups of `varlen_prefill` in splits, and of `shared_prefix`, that keep the device busy.
    # Each uses more memory than one of `paged_decode`, and waits for one tile of keys at a time.
    prefix_fill: int = 128
    # The fewest keys in such a split.
    min_prefix_split_keys: int = 128
    # Rows from which a simdgroup of `rope_write` handles several heads.  With fewer rows,
    # parallelism is worth more than sharing a sine between heads.
    rope_many_rows: int = 256
    # Threadgroups of `skinny_gemm`, of 8 simdgroups each, that keep the device busy.
    gemm_fill: int = 128
    # The most rows that `skinny_gemm` multiplies with quantised weights without instructions for
    # matrices, at most 4; guessed by counting instructions.
    max_lane_rows: int = 4
    # The most rows, and the most values of a quantised weight, with which each threadgroup of
    # `skinny_gemm` normalises the rows by itself.  The norm costs instructions for each value, and
    # products in few bits have none to spare.
    max_normed_rows: int = 16
    max_normed_weights: int = 1 << 21

    # Decodes that share a prefix

    # Tokens: the least saving in reads that repays one launch per layer; the same when rows of
    # prompts are attended to as decodes.
    min_saved_tokens: int = 8192
    min_saved_for_prompts: int = 8192
    # Cost of a row in `shared_prefix`, with or without the prefix, as a fraction of reading the
    # prefix.
    prefix_row_cost: float = 1 / 8

    # Prompts

    # Rows: the largest step whose prompt rows are attended to as decodes, or in splits.  Launches
    # cost such a step more than reading keys several times.
    rows_as_decodes: int = 64
    # Keys: the most that these rows may read beyond their shared prefix, in total.
    max_own_keys: int = 1 << 14
    # The most rows of prompts in a step with decodes that is padded to repeating shapes and
    # compiled: a chunk of 512, padded.
    small_rows: int = 768
    # The most scores of a head in such a step, if MLX's SDPA serves larger prompts faster than
    # `varlen_prefill`: those of 768 rows at a context of 8k.
    small_scores: int = 768 * 8192
    # The least keys of such a step after padding, so that a prompt's first chunks have one shape.
    min_keys: int = 1024

    # MLX's SDPA, which the reference uses

    # The most query rows in a tile.  An unfused SDPA also computes the scores that "causal" hides;
    # a fused one has nothing to save.
    sdpa_tile: int = _ANY
    # The time of one more call, and of copying one key out of the store, in scores computed.
    sdpa_call_cost: int = 1 << 21
    key_cost: int = 64
    # The most keys that one call gathers: its copy of K and V stays small beside the store.
    max_gathered_keys: int = 1 << 17
    # The most scores of all heads that one call keeps in memory if MLX does not fuse it: 128 MiB
    # in 16 bits, and up to three times that for sinks.
    max_scores: int = 1 << 26

    # Steps

    # A step that is not compiled, and has at least this many rows, is submitted layer by layer
    # while it is built.
    submitted_rows: int = 512
    # (rows, grain) pairs: a step of up to `rows` rows is padded to a multiple of `grain`; a grain
    # of 0 means the next power of two.  The last pair has no limit.  MLX reuses buffers only of
    # like size.
    row_grains: tuple[tuple[int, int], ...] = ((64, 0), (512, 64), (_ANY, 256))
    # Default fraction of `backend.memory_limit()` to use.
    memory_fraction: float = 0.9
    # The most rows of the step that measures peak memory at start; the result is scaled up for
    # larger steps.  And the longest context of that step, in tokens.
    profile_rows: int = _ANY
    profile_context: int = 4096


METAL = DeviceProfile()

# An H200 (docs/benchmarks.md).  Five measured values equal Metal's, so they are not listed here:
# gemm_fill, max_normed_rows, min_saved_for_prompts, rows_as_decodes (no other limit was tried) and
# sdpa_call_cost (the host's time for a call; scores of 16 heads).  All other values are guesses.
CUDA = DeviceProfile(
    decode_fill=256,  # measured, 132 cores
    decode_sums=64,
    decode_sums_of_four=64,
    latent_simdgroups=8,
    prefill_registers=1024,  # measured: heads of 256 take 1.2 to 1.7 times as long if shared
    prefix_fill=512,  # guessed
    max_lane_rows=0,  # guessed: products of tensor cores are cheap
    max_normed_weights=1 << 24,  # guessed
    min_saved_tokens=1 << 14,  # measured
    max_scores=1 << 29,  # measured: launches cost CUDA's host so much that few, large calls win
    memory_fraction=0.6,  # CUDA takes 30 GB more; on a full GPU steps were seen to stall
    profile_context=1 << 14,  # guessed: a chunk of 2,048 rows of 16 heads reaches max_scores there
)

# Kernels run on a CPU only in tests, where speed does not matter.  Their numbers are a GPU's, or
# small enough for tests to reach every case.
CPU = DeviceProfile(
    decode_fill=16,
    prefix_fill=16,
    sdpa_tile=256,  # measured on 2 cores: `exp` dominates, half of a causal square is wasted
    sdpa_call_cost=1 << 13,  # measured on 2 cores, as was key_cost, which is the default
    row_grains=((_ANY, 1),),  # padded rows cost as much as real rows; buffers are free
    memory_fraction=0.4,  # guessed: the limit is all memory, which other processes share
    profile_rows=64,  # a full step takes seconds; scaling up a part is conservative
)

PROFILES = {"metal": METAL, "cuda": CUDA, "cpu": CPU}


def profile() -> DeviceProfile:
    """The profile of MLX's current backend."""
    return PROFILES[backend.name()]
