"""How often MLX's products on Metal ask for their weights, and in how many launches.

Read in mlx/backend/metal/quantized.cpp and matmul.cpp at commit 846d176 of 2026-08-22.  A weight
counts once for each threadgroup row that asks for it; a cache may answer some of these.  Chips with
NAX (M5) have other kernels, which are not followed.
"""

from typing import NamedTuple


class Chip(NamedTuple):
    """The generation and the last letter of MLX's `get_architecture`: "g" base and Pro, "s" Max,
    "d" Ultra."""

    generation: int
    size: str


CHIPS = {
    "m1": Chip(13, "g"), "m2": Chip(14, "g"), "m2-ultra": Chip(14, "d"), "m3": Chip(15, "g"),
    "m4": Chip(16, "g"), "m4-max": Chip(16, "s"),
}  # fmt: skip


class Reads(NamedTuple):
    """times: of all weights.  launches: of the product.  partial: bytes of partial sums for each
    result, which are written and read again."""

    times: float
    launches: int = 1
    partial: int = 0


def _tiles(count: int, size: int) -> int:
    return -(-count // size)


def qmv_batch_limit(inputs: int, outputs: int, chip: Chip) -> int:
    """Rows from which on quantised products are tiled (`get_qmv_batch_limit`)."""
    largest = max(inputs, outputs)
    step = 0 if largest <= 2048 else 1 if largest <= 4096 else 2
    if chip.generation >= 17 and chip.size != "d":
        return (33, 25, 13)[step]
    if chip.generation >= 15 and chip.size != "d":
        return (13, 15, 13)[step]
    if chip.size == "d":
        return (32, 18, 12)[step]
    return ((14, 10, 6) if chip.generation >= 13 else (18, 12, 10))[step]


def quantised(
    rows: int, inputs: int, outputs: int, mode: str, group_size: int, chip: Chip
) -> Reads:
    """`mx.quantized_matmul(transpose=True)` of one matrix (`QuantizedMatmul::eval_gpu`)."""
    if rows < qmv_batch_limit(inputs, outputs, chip):
        is_wide = rows >= 2 and (mode != "affine" or chip.generation >= 15)
        if is_wide and inputs not in (64, 128):  # qmv_wide, not qmv_quad
            return Reads(_tiles(rows, 5))
        return Reads(rows)
    times = _tiles(rows, 32)
    align = max(group_size, 32)
    split = min(max(1, 512 // (_tiles(outputs, 32) * times)), inputs // align)
    while split > 1 and inputs % (split * align):
        split -= 1
    return Reads(times, 2, 2 * split) if split > 1 else Reads(times)


def plain(rows: int, inputs: int, outputs: int, chip: Chip) -> Reads:
    """`x @ w.T` in 16 bits (`Matmul::eval_gpu`)."""
    if rows == 1:
        return Reads(1)
    if chip.generation >= 15 and inputs % 4 == 0 and rows <= 15:  # gemv_wide
        return Reads(1 if outputs >= 65536 else _tiles(rows, 5))
    depth, largest = inputs // 16, 2048 if chip.size in "sd" else 1024
    is_few = _tiles(rows, 16) * _tiles(outputs, 16) <= largest
    if is_few and depth >= 8 and inputs >= max(rows, outputs):  # steel_gemm_splitk
        share = depth // (_tiles(rows, 32) * _tiles(outputs, 32))
        split = min(max(2, 1 << max(share - 1, 0).bit_length()), 32)
        return Reads(_tiles(rows, 16 if rows < 40 else 32), 2, 4 * split)
    return Reads(_tiles(rows, 64))


def gathered(
    pairs: int, used: float, experts: int, is_sorted: bool, is_quantised: bool
) -> float:  # fmt: skip
    """Experts that `mx.gather_qmm` or `mx.gather_mm` of single rows asks for (`GatherQMM`,
    `GatherMM`).

    pairs: of a row and an expert.  used: different experts among them.
    """
    if is_sorted and (not is_quantised or (pairs >= 16 and pairs // experts >= 4)):
        # gather_qmm_rhs, gather_mm_rhs: each tile of 16 pairs asks for the experts in it.
        return min(float(pairs), used + _tiles(pairs, 16) - 1)
    return float(pairs)  # gather_qmv, gather_mv


def used_experts(rows: int, experts: int, top_k: int) -> float:
    """Different experts, on average, if every row takes any top_k of them."""
    return experts * (1 - (1 - top_k / experts) ** rows)
