"""The launches that a model's steps fuse, as one immutable value, and the model's preparation."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.nn as nn
from mlx_lm.models import activations, gemma3_text

from vllm_metal_lite.attention.base import DeviceBatch
from vllm_metal_lite.fusion.context import NO_ROWS, FusedKernels, fusing
from vllm_metal_lite.fusion.heads import FusedLayerCache
from vllm_metal_lite.fusion.joined_projections import (
    JoinedProjection,
    join_projections,
    joined_projections,
)
from vllm_metal_lite.fusion.layers import fold_norm_weights, fuse_layers
from vllm_metal_lite.fusion.routing import compiled_routers, run_uncompiled
from vllm_metal_lite.fusion.rule_table import hooks
from vllm_metal_lite.kernels.experts import MAX_ROWS as EXPERT_ROWS
from vllm_metal_lite.kernels.registry import unused_kernels
from vllm_metal_lite.model.layer_weights import mixtures
from vllm_metal_lite.model.packed import Fusion
from vllm_metal_lite.model.seam.hooks import Named, hooked, namespaces


@dataclass(frozen=True)
class FusedLaunches(FusedKernels, Fusion):
    """The fusion of a model's steps, if the model runs on KernelAttention.

    joined: the model's joined projections.
    named: mlx-lm's functions that have a rule.
    routers: compiled functions of the model that may choose experts.
    """

    joined: tuple[JoinedProjection, ...] = ()
    named: tuple[Named, ...] = ()
    routers: tuple[Named, ...] = ()

    layer_cache = FusedLayerCache

    @contextmanager
    def building(self, step: DeviceBatch | None) -> Iterator[None]:
        replaced = hooks(self.named)
        if "expert_topk" not in self.unused:
            replaced += [(m, name, run_uncompiled) for m, name in self.routers]
        try:
            with hooked(replaced), fusing(step, self):
                yield
        finally:
            for projection in self.joined:
                projection.forget()

    @property
    def note(self) -> str:
        """The part of the start-up line that names products and experts by kernels."""
        parts = (
            ("products", self.skinny_rows, "skinny_gemm"),
            ("experts", self.expert_rows, "expert_gemm"),
        )
        return "".join(f"; {what} of {_count(rows)} by {by}" for what, rows, by in parts if rows)

    def without(self, failed_kernels: Collection[str]) -> "FusedLaunches":
        """The fusion without these kernels; KernelAttention replaces its own kernels."""
        unused = self.unused | unused_kernels(failed_kernels)
        return replace(
            self,
            skinny_rows=NO_ROWS if "skinny_gemm" in unused else self.skinny_rows,
            expert_rows=NO_ROWS if "expert_gemm" in unused else self.expert_rows,
            unused=unused,
        )


def fuse(model: nn.Module, *, joins: bool) -> FusedLaunches:
    """Prepare a model for fused forwards, in place; returns the launches that can be fused.

    joins: join projections of the same input.
    """
    if joins:
        join_projections(model)
    fold_norm_weights(model)
    fuse_layers(model)
    functions = activations.swiglu, activations.precise_swiglu, gemma3_text.clip_residual
    return FusedLaunches(
        joined=tuple(joined_projections(model)),
        named=tuple((module, f.__name__) for f in functions for module in namespaces(model, f)),
        routers=compiled_routers(model),
        unused=frozenset() if mixtures(model) else frozenset({"expert_topk"}),
    )


def _count(rows: range) -> str:
    if rows == range(1, 2):
        return "one row"
    if rows.stop > EXPERT_ROWS:
        return "all rows" if rows[0] == 1 else f"{rows[0]} rows and more"
    return f"{rows[0]} rows" if len(rows) == 1 else f"{rows[0]} to {rows[-1]} rows"
