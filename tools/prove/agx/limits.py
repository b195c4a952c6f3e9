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
_MATRICES = "sums and the next tile fill the registers; prompts only"
LIMITS = (
    Limit(("paged_decode", "of 512"), 80, "16 of V and of a query's sums a lane and head"),
    Limit(("latent_attention", "512 64"), 272, "sums, queries and the next tile are 224 of 256"),
    Limit(("latent_attention",), 41, "as above"),
    Limit(("gated_delta", "of 256", "tiles"), 619, _TILES),
    Limit(("gated_delta", "Falcon-H1", "tiles"), 403, _TILES),
    Limit(("gated_delta", "tiles"), 161, _TILES),
    Limit(("gated_delta", "of 256", "rows"), 84, "a state's row is 128 registers a lane"),
    Limit(("gated_delta", "Falcon-H1", "rows"), 60, "as above"),
    Limit(("gated_delta", "Kimi Linear float32"), 27, "gates of a row beside its state"),
    Limit(("varlen_prefill", "of 256"), 150, _MATRICES),
    Limit(("varlen_prefill",), 40, _MATRICES),
    Limit(("shared_prefix", "of 256"), 354, "as varlen_prefill, for decodes: to be mended"),
    Limit(("shared_prefix",), 95, "as above"),
    Limit(("expert_gemm", " 4 float16 4 bits"), 722, "a branch for each row of x: to be mended"),
    Limit(("skinny_gemm 64", "norm swiglu"), 21, "8 tiles of rows with a norm, seldom fused"),
)


def limit_of(case: str) -> int:
    """The most registers that a case may store."""
    return next((one.spills for one in LIMITS if all(w in case for w in one.words)), AS_MLX)


def faults(case: str, dispatched: int, fitting: int, spills: int) -> list[str]:
    """What goes beyond a limit: threads of a threadgroup, stored registers."""
    found = []
    if dispatched > fitting:
        found.append(f"{dispatched} threads are dispatched, {fitting} fit")
    if spills > limit_of(case):
        found.append(f"{spills} spills, limit {limit_of(case)}")
    return found
