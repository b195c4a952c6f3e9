"""The operations of a model besides attention: rotations and norms.

Observed while the model runs: its modules differ, but all call mx.fast.rope and mx.fast.rms_norm.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.seam.hooks import Hook, hooked
from vllm_metal_lite.model.seam.scaling import ScalingAt
from vllm_metal_lite.specs import RopeShape


class Usage:
    """Records the norms and rotations of a model's forwards.

    hidden_sizes: sizes of the normalised rows, except heads.
    """

    def __init__(self) -> None:
        self.hidden_sizes: dict[int, None] = {}
        self._head_norms: dict[int, float] = {}  # head size -> eps
        self._ropes: dict[tuple[int, RopeShape], None] = {}
        # The newest scaled heads: the array, how many leading elements were scaled, the factor.
        self._scaled: tuple[mx.array, int, float] | None = None

    @property
    def ropes(self) -> tuple[RopeShape, ...]:
        found = {replace(r, eps=self._head_norms.get(head_dim)) for head_dim, r in self._ropes}
        return tuple(sorted(found, key=str))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the calls of everything that runs meanwhile."""
        fast, array = mx.fast, mx.array
        hooks: list[Hook] = [
            (fast, "rms_norm", partial(self._rms_norm, fast.rms_norm)),
            (fast, "rope", partial(self._rope, fast.rope)),
            (array, "at", self._at(array.at)),
            *((array, name, self._mul(getattr(array, name))) for name in ("__mul__", "__rmul__")),
        ]
        try:
            with hooked(hooks):
                yield
        finally:
            self._scaled = None

    def _rms_norm(
        self, original: Callable, x: mx.array, weight: mx.array | None, eps: float, **kwargs: Any
    ) -> mx.array:
        if x.ndim == 4:
            self._head_norms[x.shape[-1]] = eps
        else:
            self.hidden_sizes[x.shape[-1]] = None
        return original(x, weight, eps, **kwargs)

    def _rope(self, original: Callable, x: mx.array, dims: int, **how: Any) -> mx.array:
        angles = how["traditional"], how["base"], how["scale"]
        scaled, count, factor = self._scaled or (None, 0, 1.0)
        factor = factor if scaled is x and count == dims else 1.0  # of the first `dims` elements
        rope = RopeShape(dims, *angles, factor=factor)
        self._ropes[x.shape[-1], rope] = None
        return original(x, dims, **how)

    def _note(self, scaled: mx.array, dims: int, factor: float) -> mx.array:
        self._scaled = scaled, dims, factor
        return scaled

    def _at(self, original: Any) -> Any:
        return property(lambda x: ScalingAt(x, original.fget(x), self._note))

    def _mul(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def mul(x: mx.array, y: Any) -> Any:
            value = original(x, y)
            heads = isinstance(y, float) and x.ndim == 4
            return self._note(value, x.shape[-1], y) if heads else value

        return mul
