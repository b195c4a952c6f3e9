"""How a model is run packed: found out when it is loaded, by trying, against the model itself.

1. Attention through the seam, recurrent layers as sequences (recurrent.py).
2. Where that fails, or its logits are not the model's own: attention a segment at a time too
   (kv_segments.py): slower, and general.
3. Where that fails as well the model is refused, by name and with the reason.
"""

import warnings
from collections.abc import Sequence

import mlx.nn as nn

from vllm_metal_lite.attention.kernels import KernelAttention
from vllm_metal_lite.attention.reference import ReferenceAttention
from vllm_metal_lite.attention.step import Attention, AttentionShape
from vllm_metal_lite.errors import ModelLoadError, one_line
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.joined import Product
from vllm_metal_lite.model.layout import Layout
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.model.trial import BLOCK, Problem, Trial


class _Observer(ReferenceAttention):
    """Notes how a model attends."""

    def __init__(self, store: PagedStore) -> None:
        super().__init__(store)
        self.shapes: dict[AttentionShape, None] = {}

    def attend(self, layer, q, step, **how):
        _, kv_heads, k_dim = self.store.keys[layer].shape
        self.shapes[AttentionShape(
            q.shape[1], kv_heads, k_dim, self.store.values[layer].shape[2], q.dtype,
            how.get("window"), how.get("softcap"), how.get("sinks") is not None, "q_pe" in how,
            how.get("chunk"),
        )] = None  # fmt: skip
        return super().attend(layer, q, step, **how)


def fit(
    model: nn.Module, layout: Layout, model_type: str, products: Sequence[Product] = ()
) -> tuple[PackedModel, list[AttentionShape]]:
    """The model, ready for packed steps, and the shapes that its attention has in the seam.

    Trying it also evaluates what models compute lazily when they are made and keep outside of their
    parameters (RoPE's frequencies): MLX can only do so in the thread that made it.
    """
    try:
        trial = Trial(model, layout.vocab_size)
    except Exception as e:
        raise ModelLoadError(f"mlx-lm cannot run this {model_type}: {one_line(e)}") from e
    last = None  # what is wrong with the form before
    for _ in ("packed", "by segment"):
        packed = PackedModel(model, layout, last and last.text, products)
        attention = _Observer(PagedStore(layout.specs, 4, BLOCK))
        problem = trial.problem(packed, attention)
        if problem is None:
            if packed.by_segment:
                _warn_by_segment(packed.by_segment, model_type, last and last.is_unexpected)
            return packed, list(attention.shapes)
        last = problem
    raise ModelLoadError(f"the architecture {model_type} is not supported: {last.text}")


def _warn_by_segment(reason: str, model_type: str, is_unexpected: bool | None) -> None:
    advice = "Please report this: such a model could be packed."
    if not is_unexpected:
        advice = "Its answers are right. docs/models.md lists the architectures that run packed."
    warnings.warn(
        f"SLOW: attention of this {model_type} runs a segment at a time. Each step copies the "
        "context of every request, kernels and the prefix cache are off, and even one request can "
        f"run at half the speed of mlx-lm alone. Reason: {reason}. {advice}",
        stacklevel=3,
    )


def check_fusing(packed: PackedModel, attention: Attention) -> None:
    """Do without fused launches, and say so, if with them the logits are not the model's own.

    Each kernel was checked by itself; this is whether they stand for what this model computes.
    Products of few rows are tried both ways: larger steps go without `skinny_gemm` in any case.
    """
    if not attention.fuses:
        return
    trial = Trial(packed.model, packed.layout.vocab_size)

    def problem(skinny_rows: range) -> Problem | None:
        store = PagedStore(packed.attention_specs, 4, attention.store.block_size)
        like = KernelAttention(store, attention.prefill, skinny_rows=skinny_rows)
        return trial.problem(packed, like)

    if wrong := problem(range(0)):
        attention.fuses, attention.skinny_rows = False, range(0)
        warnings.warn(f"fused launches do not suit this model: {wrong.text}", stacklevel=2)
    elif attention.skinny_rows and (wrong := problem(attention.skinny_rows)):
        attention.skinny_rows = range(0)
        message = f"products by skinny_gemm do not suit this model: {wrong.text}"
        warnings.warn(message, stacklevel=2)
