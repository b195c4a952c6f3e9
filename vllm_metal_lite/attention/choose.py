"""Which attention path serves a model on this device, and why."""

import warnings
from collections.abc import Sequence

from vllm_metal_lite import backend
from vllm_metal_lite.attention.kernels import PREFILLS, ROWS_AS_DECODES, KernelAttention
from vllm_metal_lite.attention.reference import ReferenceAttention
from vllm_metal_lite.attention.step import Attention, AttentionShape
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import ATTENTION
from vllm_metal_lite.errors import ConfigError, Option
from vllm_metal_lite.kernels import fusedcheck, ops, selfcheck
from vllm_metal_lite.kernels.products import MAX_ROWS
from vllm_metal_lite.kv.store import PagedStore


def choose(
    option: str,
    store: PagedStore,
    shapes: Sequence[AttentionShape],
    by_segment: str | None = None,
) -> tuple[Attention, str]:
    """The path for a model that attends with `shapes`, and the reason in a few words.

    option: "reference", "kernels" or "auto".  Under "auto" kernels that cannot run here, or that
    disagree with the reference, give way to it, the latter with a warning; under "kernels" that
    raises ConfigError.  by_segment: why the model attends a segment at a time, None if it does
    not: it then reads K and V by MLX operations, which must not touch a store that kernels write.
    Products of few rows all go through `skinny_gemm` if it is right: whether that is faster
    `tune_products` finds out.
    """
    if option not in ATTENTION:
        raise ConfigError(Option("attention"), f" must be one of {list(ATTENTION)}, got {option!r}")
    if by_segment is not None:
        by_segment = f"this model's attention runs a segment at a time: {by_segment}"
    if option == "reference":
        reason = "asked for" if by_segment is None else f"asked for; {by_segment}"
        return ReferenceAttention(store), reason
    reason = by_segment or _unsupported(option, shapes)
    if reason is None:
        verdicts = [selfcheck.verdict(shape, store.block_size) for shape in shapes]
        failures = [f for v in verdicts for f in v.failures]
        # Done without: prompts and shared prefixes go another way.  So are fused launches, and
        # products of few rows.
        fatal = [f for f in failures if f.kernel not in ("varlen_prefill", "shared_prefix")]
        fused = [] if fatal else [f for shape in shapes for f in fusedcheck.failures(shape)]
        failures += fused
        if failures and option == "auto":
            slower = "the reference attention, which is slower"
            instead = slower if fatal else "MLX's own operations instead"
            warnings.warn(
                f"a kernel fails its check on this device: {failures[0]}; using {instead}. "
                "Please report what `vllm-metal-lite doctor` prints.",
                stacklevel=2,
            )
        if not fatal:
            prefill = max((v.prefill for v in verdicts), key=PREFILLS.index)
            how = {"varlen": "varlen_prefill", "gather": "MLX's SDPA"}[prefill]
            checked = "right" if not failures else "the others right"
            groups = {s.num_heads // s.num_kv_heads for s in shapes}
            wrong = {f.kernel for f in failures}
            fuses = all(f.kernel == "skinny_gemm" for f in fused)
            shares = "shared_prefix" not in wrong
            # It is for 16 bits, and checked where attention has them.
            multiplies = fuses and any(s.dtype != mx.float32 for s in shapes)
            multiplies &= "skinny_gemm" not in wrong
            attention = KernelAttention(
                store, prefill, fuses, groups, shares,
                skinny_rows=range(1, MAX_ROWS + 1) if multiplies else range(0),
                rows_as_decodes=ROWS_AS_DECODES if shares else 0,
            )  # fmt: skip
            return attention, f"{checked} on this device; prompts by {how}"
        reason = f"a kernel fails its check: {fatal[0]}"
    if option == "kernels":
        raise ConfigError(Option("attention"), f"='kernels' is not possible: {reason}")
    return ReferenceAttention(store), reason


def _unsupported(option: str, shapes: Sequence[AttentionShape]) -> str | None:
    if not shapes:
        return "no layer of this model attends"
    if option == "auto" and backend.is_cpu():
        return "kernels need a GPU"
    return next((reason for s in shapes if (reason := ops.unsupported(s))), None)
