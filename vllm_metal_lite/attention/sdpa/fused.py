"""Which calls MLX's SDPA fuses.  All other calls keep their scores in memory.

Source: `has_fused_kernel` and `use_fallback` in MLX's scaled_dot_product_attention.cpp, for values
as wide as keys, in 16 bits.
"""

from typing import NamedTuple

from vllm_metal_lite import backend

# Head dimensions that MLX fuses for prompts: these on Metal, all up to 128 on CUDA.
_FUSED_DIMS, _MOST_FUSED_DIM = (64, 72, 80, 96, 128), 128
# This is more rows than any call has.
_NEVER = 1 << 31
# MLX fuses heads of 256 as well: calls of few rows, and, by neural accelerators, those of many.
_LARGE_DIM, _FEW_ROWS, _MANY_ROWS = 256, 8, 1024


class Unfused(NamedTuple):
    """A layer with calls that MLX does not fuse.

    heads: query heads.  few_rows: MLX fuses calls of at most this many rows.  fused_rows: MLX fuses
    "causal" calls of at least this many rows.
    """

    heads: int
    few_rows: int = 0
    fused_rows: int = _NEVER

    def fuses(self, rows: int, mask: str | None) -> bool:
        return rows <= self.few_rows or (mask == "causal" and rows >= self.fused_rows)


def unfused(heads: int, dim: int, softcap: float | None) -> Unfused | None:
    """The calls of `heads` query heads of size `dim` that MLX does not fuse; None: it fuses all."""
    if softcap is not None or backend.is_cpu():
        return Unfused(heads)
    if dim in _FUSED_DIMS or (dim <= _MOST_FUSED_DIM and backend.name() == "cuda"):
        return None
    if dim == _LARGE_DIM:
        fused_rows = _MANY_ROWS if backend.has_neural_accelerators() else _NEVER
        return Unfused(heads, _FEW_ROWS, fused_rows)
    return Unfused(heads)
