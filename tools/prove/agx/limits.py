"""How many registers each kernel may store in memory, and what a text must not exceed."""

from typing import NamedTuple

# MLX's own kernels store up to 14 (qmm_t), and are known to be fast: so may each of ours.
AS_MLX = 14


class Limit(NamedTuple):
    """Most stored registers of cases whose names hold all words.  The first that fits counts."""

    words: tuple[str, ...]
    spills: int
    reason: str


_TILES = "registers change places where branches meet, mostly Mesa's doing; prompts only"
_QUERIES = "queries of bfloat16 count as floats here; prompts, or many rows"
LIMITS = (
    Limit(("latent_attention", "512/64 float32"), 297, "8 simdgroups: 16 have no memory"),
    Limit(("latent_attention", "512/64 float16"), 17, "sums, queries and the next tile"),
    Limit(("latent_attention", "512/64"), 77, "as above; queries of bfloat16 count as floats here"),
    Limit(("latent_attention",), 16, "as above"),
    # A check of gated_delta compiles the kernel twice: first for tiles of rows, then (#2) for
    # single rows.
    Limit(("gated_delta", "256x256", "#2"), 82, "a state's row is 128 registers a lane"),
    Limit(("gated_delta", "256x128", "#2"), 68, "as above"),
    Limit(("gated_delta", "float32, vector gates", "#2"), 27, "gates of a row beside its state"),
    Limit(("gated_delta", "#2"), AS_MLX, "the state of a row fits"),
    Limit(("gated_delta", "256x256"), 489, _TILES),
    Limit(("gated_delta", "256x128"), 314, _TILES),
    Limit(("gated_delta",), 145, _TILES),
    Limit(("shared_prefix", "of 256", "bfloat16"), 46, _QUERIES),
    Limit(("split_prefill", "of 256", "float32"), 33, "as below, beside the next tile"),
    Limit(("varlen_prefill", "of 256", "bfloat16"), 42, _QUERIES),
    Limit(("varlen_prefill", "of 256", "float32"), 30, "queries and sums are 192 of 256"),
    Limit(("skinny_gemm (64 x",), 21, "8 tiles of rows with a norm, seldom fused"),
)


def limit_of(case: str) -> int:
    """The most registers that a case may store."""
    return next((one.spills for one in LIMITS if all(w in case for w in one.words)), AS_MLX)


def faults(case: str, dispatched: int, fitting: int, spills: int) -> list[str]:
    """The excess over the limits: threads of a threadgroup, stored registers."""
    found = []
    if dispatched > fitting:
        found.append(f"{dispatched} threads are dispatched, {fitting} fit")
    if spills > limit_of(case):
        found.append(f"{spills} spills, limit {limit_of(case)}")
    return found
