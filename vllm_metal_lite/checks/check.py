"""One kernel at one shape, and the result of its check: values that cross processes."""

import copyreg
import math
from collections.abc import Callable
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
    """A product of `rows` rows with a weight.  It is fused with a norm, SwiGLU and a residual sum;
    if `biased`, with a bias and GeGLU instead."""

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

    block_size: 0 if blocks do not matter.  rope: the rotation of new rows; a check of
    `merge_partitions` or `shared_prefix` with a rotation runs the fused decode.  beside: the
    kernels that this check runs in addition to those that the kernel always needs.  spans: whether
    rows of one picture see each other.
    """

    kernel: str
    shape: S
    block_size: int = 0
    rope: RopeShape | None = None
    beside: tuple[str, ...] = ()
    spans: bool = False

    def __str__(self) -> str:
        parts = [str(self.shape)]
        parts += [f"blocks of {self.block_size}"] if self.block_size else []
        parts += [str(self.rope)] if self.rope else []
        parts += ["behind a shared prefix"] if "shared_prefix" in self.beside else []
        parts += ["with spans"] if self.spans else []
        return f"{self.kernel} ({', '.join(parts)})"

    @property
    def needs(self) -> tuple[str, ...]:
        """The other kernels that must be correct before this check means anything."""
        return REGISTRY[self.kernel].needs + self.beside


AttentionCheck = Check[AttentionShape]

Work = Callable[[], object]
# The work with the kernel, and the same work by its fallback.
Pair = tuple[Work, Work]


class Loads(NamedTuple):
    """The work that is timed: so much that the device's time counts, not the host's.

    decodes, context: requests, and the tokens of each.  long: the tokens of a context in splits.
    drafted: the rows of a request with drafts.
    prefix: the tokens that decodes share.  prompts: (requests, context, rows of each); the default
    is four whole prompts, and a chunk.  rows: the rows of launches without attention.
    """

    decodes: int = 16
    context: int = 512
    long: int = 4096
    drafted: int = 4
    prefix: int = 2048
    prompts: tuple[tuple[int, int, int], ...] = ((4, 512, 512), (1, 4096, 1024))
    rows: int = 512


# A kernel is replaced if it takes more than _SLOWER times as long as its fallback.  Medians of
# short launches differ by up to a third between two runs, so a smaller factor measures noise.
_SLOWER = 1.5
# Seconds by which the host may take longer to launch a kernel than an MLX operation.  Compiled
# steps do not take this time.
_LAUNCH = 30e-6


@dataclass(frozen=True)
class Speed:
    """Seconds of a kernel and of its fallback, for the same work."""

    seconds: float
    fallback_seconds: float

    @property
    def ratio(self) -> float:
        """Above 1: the fallback is faster."""
        return self.seconds / self.fallback_seconds

    @property
    def is_slow(self) -> bool:
        return self.seconds - _LAUNCH > _SLOWER * self.fallback_seconds

    def __str__(self) -> str:
        times = (f"{1e6 * seconds:,.0f} us" for seconds in (self.seconds, self.fallback_seconds))
        return "takes {} where its fallback takes {}".format(*times)


@dataclass(frozen=True)
class CheckResult:
    """error: the largest error, divided by the allowed error.

    failure: one line that says why the kernel did not run.  ended: the kernel hung, or ended the
    process.  speed: None if nothing was timed.
    timing_failed: the kernel is correct, but timing it raised an error.
    """

    check: Check
    error: float = math.inf
    failure: str | None = None
    ended: bool = False
    speed: Speed | None = None
    timing_failed: bool = False

    @property
    def kernel(self) -> str:
        return self.check.kernel

    @property
    def passed(self) -> bool:
        """Whether the kernel is correct, fast or slow."""
        return self.failure is None and self.error <= 1

    def __str__(self) -> str:
        if self.failure is not None:
            return f"{self.check}: {self.failure}"
        if not math.isfinite(self.error):
            return f"{self.check}: its results are NaN, or differ where none may"
        return f"{self.check}: the error is {self.error:.2g} times the allowed one"
