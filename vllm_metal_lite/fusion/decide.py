"""Decides which launches of a model's steps are fused: by checks, a trial and timing."""

import hashlib
import logging
from collections.abc import Collection
from dataclasses import replace
from importlib.metadata import version

from mlx.utils import tree_map

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import Attention
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.fusion.fused import FusedLaunches, fuse
from vllm_metal_lite.fusion.tune import faster_expert_rows, faster_rows
from vllm_metal_lite.kernels.experts import MAX_ROWS as EXPERT_ROWS
from vllm_metal_lite.kernels.launch import one_by_one
from vllm_metal_lite.kernels.registry import left_out
from vllm_metal_lite.kernels.remembered import Remembered
from vllm_metal_lite.kernels.skinny_gemm import MAX_ROWS
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.experts import served_experts
from vllm_metal_lite.model.packed import NO_FUSION, Fusion, PackedModel
from vllm_metal_lite.model.trial import Problem, Trial
from vllm_metal_lite.model.usage import product_weights

logger = logging.getLogger(__name__)


def decide(
    packed: PackedModel,
    attention: Attention,
    wrong: Collection[str] = (),
    ranks: RankGroup = ALONE,
) -> tuple[Fusion, str]:
    """The fusion for a model's steps, and its part of the start-up line.

    wrong: kernels that are not used on this device.  ranks: all of them decide as one.

    The checks cover each kernel alone; the trial here covers the fused kernels in this model.  If
    the trial fails, nothing is fused, with a warning.  Raises KernelError if a launch fails in the
    trial.  Changes the model in place; forwards without fusion are unaffected.
    """
    if not isinstance(attention, KernelAttention):
        return NO_FUSION, ""
    # On a CPU the products dominate, and columns of a joined product are not contiguous.
    fusion = fuse(packed.model, joins=not backend.is_cpu()).without(wrong)
    trials = _Trials(packed, attention, ranks)
    if problem := trials.problem(fusion):
        logger.warning(f"fused launches do not suit this model: {problem.text}")
        return NO_FUSION, ""
    if all(s.dtype == mx.float32 for s in packed.attention_specs):
        return fusion, ""
    for kernel, add in (("skinny_gemm", _with_skinny_gemm), ("expert_gemm", _with_experts)):
        if kernel not in left_out(wrong):
            fusion = add(trials, fusion)
    return fusion, fusion.note


class _Trials:
    """Trials of one model with its attention.  A pass is remembered for models of this form."""

    def __init__(
        self, packed: PackedModel, attention: KernelAttention, ranks: RankGroup = ALONE
    ) -> None:
        self.packed, self.attention, self.ranks = packed, attention, ranks
        self._found = Remembered()
        self._trial: Trial | None = None

    def problem(self, fusion: FusedLaunches) -> Problem | None:
        """Why a fusion does not suit the model, or None if it does."""
        key = f"trial of {self._form(fusion)}"
        if all(self.ranks.gather(key in self._found.known)):
            return None
        logger.info("trying fused launches with this model", extra={"transient": True})
        if self._trial is None:
            self._trial = Trial(self.packed.model, self.packed.layout.vocab_size, self.ranks)
        store = PagedStore(
            self.packed.attention_specs, 4, self.attention.store.block_size,
            states=self.packed.state_pool(2),
        )  # fmt: skip
        attention = self.attention.over(store)
        problem = self._trial.problem(self.packed, attention, fusion)
        if problem is not None:
            with one_by_one():  # raises if a launch fails
                self._trial.problem(self.packed, attention, fusion)
        # Without a GPU, kernels run only in tests, which change what this finding depends on.
        if problem is None and not backend.is_cpu():
            self._found.add(key, "passed")
        return problem

    def _form(self, fusion: FusedLaunches) -> str:
        """Everything but the values of the weights: code, sizes, types, and the kernels in use."""
        model, attention = self.packed.model, self.attention
        weights = tree_map(lambda w: (w.shape, str(w.dtype)), model.parameters())
        form = [
            version("mlx-lm"), type(model).__module__, repr(getattr(model, "args", None)), weights,
            fusion.skinny_rows, fusion.expert_rows, fusion.adds_norms, attention.prefill,
            sorted(attention.without),
        ]  # fmt: skip
        name = type(model).__module__.rpartition(".")[2]
        return f"{name} {hashlib.sha256(repr(form).encode()).hexdigest()[:16]}"


def _with_skinny_gemm(trials: _Trials, fusion: FusedLaunches) -> FusedLaunches:
    """Tried second: larger steps never use `skinny_gemm`, so fusion must pass without it first."""
    packed, attention = trials.packed, trials.attention
    skinny = replace(fusion, skinny_rows=range(1, MAX_ROWS + 1))
    if not product_weights(packed.model):
        return fusion
    if problem := trials.problem(skinny):
        logger.warning(f"products by skinny_gemm do not suit this model: {problem.text}")
        return fusion
    rows = faster_rows(packed, attention, skinny, trials.ranks)
    return replace(fusion, skinny_rows=rows)


def _with_experts(trials: _Trials, fusion: FusedLaunches) -> FusedLaunches:
    """The same of mixtures of experts."""
    packed, attention = trials.packed, trials.attention
    ours = replace(fusion, expert_rows=range(1, EXPERT_ROWS + 1))
    if not served_experts(packed.model):
        return fusion
    if problem := trials.problem(ours):
        logger.warning(f"experts by expert_gemm do not suit this model: {problem.text}")
        return fusion
    rows = faster_expert_rows(packed, attention, ours, trials.ranks)
    return replace(fusion, expert_rows=rows)
