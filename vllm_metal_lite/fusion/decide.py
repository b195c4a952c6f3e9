"""Decides which launches of a model's steps are fused: by checks, a trial and timing."""

import logging
from collections.abc import Collection
from dataclasses import replace

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import Attention
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.fused import FusedLaunches, fuse, without
from vllm_metal_lite.fusion.tune import NONE, faster_rows
from vllm_metal_lite.kernels.skinny_gemm import MAX_ROWS
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.packed import NO_FUSION, Fusion, PackedModel
from vllm_metal_lite.model.trial import Problem, Trial

logger = logging.getLogger(__name__)


def decide(
    packed: PackedModel, attention: Attention, wrong: Collection[str] = ()
) -> tuple[Fusion, str]:
    """The fusion for a model's steps, and its part of the start-up line.

    wrong: kernels that are not used on this device.  The checks cover each kernel alone; the
    trial here covers the fused kernels in this model.  If the trial fails, nothing is fused, with
    a warning.  Changes the model in place; forwards without fusion are unaffected.
    """
    if not isinstance(attention, KernelAttention):
        return NO_FUSION, ""
    # On a CPU the products dominate, and columns of a joined product are not contiguous.
    fusion = without(fuse(packed.model, joins=not backend.is_cpu()), wrong)
    trial = Trial(packed.model, packed.layout.vocab_size)
    if wrong_logits := _problem(trial, packed, attention, fusion):
        logger.warning(f"fused launches do not suit this model: {wrong_logits.text}")
        return NO_FUSION, ""
    if "skinny_gemm" in wrong or all(s.dtype == mx.float32 for s in packed.attention_specs):
        return fusion, ""
    return _with_skinny_gemm(trial, packed, attention, fusion)


def _with_skinny_gemm(
    trial: Trial, packed: PackedModel, attention: KernelAttention, fusion: FusedLaunches
) -> tuple[FusedLaunches, str]:
    """Tried second: larger steps never use `skinny_gemm`, so fusion must pass without it first."""
    skinny = replace(fusion, skinny_rows=range(1, MAX_ROWS + 1))
    if wrong_logits := _problem(trial, packed, attention, skinny):
        logger.warning(f"products by skinny_gemm do not suit this model: {wrong_logits.text}")
        return fusion, ""
    rows = faster_rows(packed, attention, skinny)
    if rows == NONE:
        return fusion, ""
    count = "one row" if len(rows) == 1 else f"{rows[0]} to {rows[-1]} rows"
    return replace(fusion, skinny_rows=rows), f"; products of {count} by skinny_gemm"


def _problem(
    trial: Trial, packed: PackedModel, attention: KernelAttention, fusion: Fusion
) -> Problem | None:
    store = PagedStore(packed.attention_specs, 4, attention.store.block_size)
    return trial.problem(packed, attention.over(store), fusion)
