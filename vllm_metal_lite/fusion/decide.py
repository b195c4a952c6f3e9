"""Decides which launches of a model's steps are fused: by checks, a trial and timing."""

import hashlib
import logging
from dataclasses import replace
from functools import partial
from importlib.metadata import version

from mlx.utils import tree_map

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import Attention
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import RankGroup
from vllm_metal_lite.fusion.launches import FusedLaunches, fuse
from vllm_metal_lite.fusion.tune import faster_expert_rows, faster_rows
from vllm_metal_lite.kernels.experts import MAX_ROWS as EXPERT_ROWS
from vllm_metal_lite.kernels.findings import Findings
from vllm_metal_lite.kernels.launch import KernelError, one_by_one
from vllm_metal_lite.kernels.skinny_gemm import MAX_ROWS
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.layer_weights import mixtures, product_weights
from vllm_metal_lite.model.packed import NO_FUSION, Fusion, PackedModel
from vllm_metal_lite.model.trial import Trial

logger = logging.getLogger(__name__)


def decide(packed: PackedModel, attention: Attention, ranks: RankGroup) -> Fusion:
    """The fusion for a model's steps.  ranks: all take the same decision.

    The checks cover each kernel alone; the trial here covers the fused kernels in this model.  If
    the trial fails, nothing is fused, with a warning.  Raises KernelError if a launch fails in the
    trial.  Changes the model in place: joined projections and folded norms stay without fusion.
    The trial cannot test them, because its reference logits use them.
    """
    if not isinstance(attention, KernelAttention):
        return NO_FUSION
    # On a CPU the products dominate, and columns of a joined product are not contiguous.
    fusion = fuse(packed.model, joins=not backend.is_cpu())
    fusion = fusion.without(attention.failed_kernels)
    trials = _Trials(packed, attention, ranks)
    if not trials.passed(fusion, "fused launches"):
        return NO_FUSION
    if packed.layout.dtype == mx.float32:
        return fusion
    # A stage without experts takes part in the trials and timings of the others.
    own = bool(product_weights(packed.model)), bool(mixtures(packed.model))
    has_products, has_experts = map(any, zip(*ranks.gather(own), strict=True))
    # Steps of many rows use neither of these kernels, so fusion without them was tried first.
    if "skinny_gemm" not in fusion.unused and has_products:
        ours = replace(fusion, skinny_rows=range(1, MAX_ROWS + 1))
        if trials.passed(ours, "products by skinny_gemm"):
            rows = faster_rows(packed, attention, ours, ranks)
            fusion = replace(fusion, skinny_rows=rows)
    if "expert_gemm" not in fusion.unused and has_experts:
        ours = replace(fusion, expert_rows=range(1, EXPERT_ROWS + 1))
        if trials.passed(ours, "experts by expert_gemm"):
            rows = faster_expert_rows(packed, attention, ours, ranks)
            fusion = replace(fusion, expert_rows=rows)
    return fusion


class _Trials:
    """Trials of one model with its attention.  A pass is remembered for its fingerprint.

    The store is never quantised: its error would hide an error of a launch.
    """

    def __init__(self, packed: PackedModel, attention: KernelAttention, ranks: RankGroup) -> None:
        self.packed, self.attention, self.ranks = packed, attention, ranks
        self._found = Findings()
        self._trial: Trial | None = None

    def passed(self, fusion: FusedLaunches, what: str) -> bool:
        """Whether a fusion suits the model.  If not, a warning names `what` and the problem."""
        try:
            problem = self.problem(fusion)
        except KernelError:
            raise
        except Exception:  # the model has passed its trial without fusion
            logger.exception(f"a fault of vllm-metal-lite, not of this model: no {what}")
            return False
        if problem is not None:
            logger.warning(f"{what} do not suit this model: {problem}; they are not used")
        return problem is None

    def problem(self, fusion: FusedLaunches) -> str | None:
        """Why a fusion does not suit the model, or None if it does."""
        key = f"trial of {self._fingerprint(fusion)}"
        if all(self.ranks.gather(key in self._found.known)):
            return None
        logger.info("trying fused launches with this model", extra={"transient": True})
        if self._trial is None:
            self._trial = Trial(self.packed.model, self.packed.layout.vocab_size, self.ranks)
        states, size = self.packed.state_store(2), self.attention.store.block_size
        store = PagedStore(self.packed.layout.specs, 4, size, states=states)
        attention = self.attention.over(store)
        run = partial(self._trial.problem, self.packed, attention, fusion)
        again = one_by_one()(run)  # raises if a launch fails
        try:
            problem = run()
        except Exception:
            again()
            raise
        if problem is not None:
            again()
        # Without a GPU, kernels run only in tests, which replace parts that this finding covers.
        if problem is None and not backend.is_cpu():
            self._found.add(key, "passed")
        return problem

    def _fingerprint(self, fusion: FusedLaunches) -> str:
        """A hash of the code, sizes, types and kernels in use, but not of the weights' values."""
        model, attention = self.packed.model, self.attention
        weights = tree_map(lambda w: (w.shape, str(w.dtype)), model.parameters())
        code = version("mlx-lm"), type(model).__module__, repr(getattr(model, "args", None))
        fused = fusion.skinny_rows, fusion.expert_rows, sorted(fusion.unused)
        used = attention.store.block_size, attention.prefill, sorted(attention.failed_kernels)
        parts = [*code, weights, *fused, *used]
        name = type(model).__module__.rpartition(".")[2]
        return f"{name} {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
