"""Chooses the mode of a model at load time, by a trial against the model itself.

The modes (`Mode`) are tried in order, the fastest first.  A mode fails if it raises, or if its
logits differ from the model's own; the log has the traceback of an error of this package.  If all
fail, ModelLoadError names the architecture and the reason.
"""

import logging
from collections.abc import Callable

import mlx.nn as nn
import numpy as np

from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.errors import ModelLoadError, is_our_fault, one_line
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.layout import Layout
from vllm_metal_lite.model.packed import Mode, PackedForward, PackedModel
from vllm_metal_lite.model.trial import BLOCK, LENGTHS, Trial, built_steps
from vllm_metal_lite.model.usage import Usage

logger = logging.getLogger(__name__)


# The model, ready for packed steps, and the shapes that the kernels must serve.
Fit = tuple[PackedModel, Usage]


def fit(model: nn.Module, layout: Layout, model_type: str, ranks: RankGroup = ALONE) -> Fit:
    """Try the modes of a model in turn; raises ModelLoadError if none fits.

    The trial also evaluates lazy arrays that are not parameters (RoPE's frequencies): MLX can
    evaluate them only in the thread that created them.
    """
    mx.eval(model.parameters())  # lazy ones of the files and of the adapters
    try:
        trial = Trial(model, layout.vocab_size, ranks)
    except Exception as e:
        raise ModelLoadError(f"mlx-lm cannot run this {model_type}: {one_line(e)}") from e
    packed, usage = _choose(model, layout, model_type, trial.problem)
    if packed.by_segment is not None:
        logger.warning(
            f"SLOW: attention of this {model_type} runs a segment at a time. Each step copies the "
            "context of every request, kernels are off, and even one request can run at half the "
            f"speed of mlx-lm alone. Reason: {packed.by_segment}. Answers are correct. Please "
            "report it, unless docs/models.md lists this type under attention by segment."
        )
    return packed, usage


def foresee(model: nn.Module, layout: Layout, model_type: str, ranks: RankGroup = ALONE) -> Fit:
    """As `fit`, but from the model's code alone: graphs are built and not evaluated, so no weight
    is read.  `fit` also compares logits, so it may choose a later mode, or refuse the model."""
    return _choose(model, layout, model_type, _build)


def _build(packed: PackedForward, attention: ReferenceAttention) -> None:
    for _ in built_steps(packed, attention, [np.zeros(n, np.int32) for n in LENGTHS]):
        pass


def _choose(
    model: nn.Module,
    layout: Layout,
    model_type: str,
    problem_of: Callable[[PackedForward, ReferenceAttention], str | None],
) -> Fit:
    """The first mode without a problem; ModelLoadError if all have one."""
    reason = None  # why the previous mode does not fit
    for mode in Mode:
        if mode is Mode.IN_SEQUENCES and not layout.states:
            continue
        packed = PackedModel(model, layout, mode, reason)
        store = PagedStore(layout.specs, 4, BLOCK, states=packed.state_store(2))
        usage = Usage()
        try:
            reason = problem_of(usage.recorded(packed), ReferenceAttention(store))
        except Exception as e:  # a model may use what the seam's stand-ins do not have
            reason = f"{type(e).__name__}: {one_line(e)}"
            if is_our_fault(e):
                logger.exception(f"a fault of vllm-metal-lite: {model_type} does not run {mode}")
        if reason is None:
            return packed, usage
        packed.release()
    raise ModelLoadError(f"the architecture {model_type} is not supported: {reason}")
