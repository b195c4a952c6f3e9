"""One kernel at one shape: a value that one process makes and another one runs."""

import copyreg
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from vllm_metal_lite.backend import dtype_name, mx
from vllm_metal_lite.kernels.registry import REGISTRY
from vllm_metal_lite.specs import (
    AttentionShape,
    ExpertShape,
    RecurrentShape,
    RopeShape,
    WeightShape,
)


def _dtype(name: str) -> mx.Dtype:
    return getattr(mx, name)


copyreg.pickle(mx.Dtype, lambda dtype: (_dtype, (dtype_name(dtype),)))  # checks cross processes


class NormShape(NamedTuple):
    """Rows of `size` elements, the hidden size of a model."""

    size: int
    dtype: mx.Dtype

    def __str__(self) -> str:
        return f"{self.size} {dtype_name(self.dtype)}"


class ProductShape(NamedTuple):
    """A product of rows and a weight, fused with a norm, SwiGLU and a residual sum; or, if it is
    biased, with a bias and GeGLU."""

    rows: int
    weight: WeightShape
    dtype: mx.Dtype
    biased: bool

    def __str__(self) -> str:
        outputs, depth, how = self.weight
        text = f"{self.rows} x {outputs} x {depth} {dtype_name(self.dtype)}"
        return text + (f", {how}" if how else "") + (", biased" if self.biased else "")


class MixtureShape(NamedTuple):
    """A mixture of experts of rows of dtype."""

    experts: ExpertShape
    dtype: mx.Dtype

    def __str__(self) -> str:
        return f"{self.experts}, {dtype_name(self.dtype)}"


Shape = AttentionShape | NormShape | ProductShape | MixtureShape | RecurrentShape
S = TypeVar("S", bound=Shape)


@dataclass(frozen=True)
class Check(Generic[S]):
    """kernel: a name in the registry.

    block_size: 0 if blocks do not matter.  rope: of the new rows; with `merge_partitions` and
    `shared_prefix` it selects the fused decode.  beside: kernels that this check runs too, in
    addition to those that the kernel always needs.
    """

    kernel: str
    shape: S
    block_size: int = 0
    rope: RopeShape | None = None
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [str(self.shape)]
        parts += [f"blocks of {self.block_size}"] if self.block_size else []
        parts += [str(self.rope)] if self.rope else []
        parts += ["behind a shared prefix"] if "shared_prefix" in self.beside else []
        return f"{self.kernel} ({', '.join(parts)})"

    @property
    def needs(self) -> tuple[str, ...]:
        """The other kernels that must be correct before this check means anything."""
        return REGISTRY[self.kernel].needs + self.beside
