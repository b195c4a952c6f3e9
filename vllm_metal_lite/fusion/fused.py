"""The launches that become one in a model's steps, as one immutable value."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from vllm_metal_lite.attention.base import Step
from vllm_metal_lite.fusion import linear
from vllm_metal_lite.fusion.hooks import fused_functions
from vllm_metal_lite.fusion.joined import JoinedProjection
from vllm_metal_lite.fusion.layer_cache import FusedLayerCache
from vllm_metal_lite.model.seam.hooks import hooked


@dataclass(frozen=True)
class FusedLaunches:
    """A Fusion (model/packed.py) for models whose K and V kernels write.

    joined: the model's joined projections.  activations: the modules by whose name `swiglu` the
    model calls mlx-lm's.  skinny_rows: products of so many rows go through `skinny_gemm`.
    """

    joined: tuple[JoinedProjection, ...] = ()
    activations: tuple[ModuleType, ...] = ()
    skinny_rows: range = range(0)

    layer_cache = FusedLayerCache

    @contextmanager
    def building(self, step: Step) -> Iterator[None]:
        functions = fused_functions(step.positions, self.activations, self.skinny_rows)
        try:
            with hooked(functions), linear.fusing(self.skinny_rows):
                yield
        finally:
            for projection in self.joined:
                projection.forget()
