"""The seam of recurrent layers: mlx-lm's modules, unmodified, over packed rows.

mlx-lm's recurrent layers differ in their projections and norms, but share three operations:

    conv1d(concatenate([state, rows], axis=1))     a depthwise convolution, mostly followed by SiLU
    gated_delta_update(q, k, v, ..., state)        qwen3_next, qwen3_5, olmo_hybrid, kimi, ...
    ssm_update(x, A_log, B, C, ..., state)         mamba2, nemotron_h, granite, falcon_h1, plamo2

A state is a StateHandle of the layer's cache.  An operation that receives one continues the states
of all segments (recurrence/).  Any other use of a handle fails; then the trial at load gives
these modules sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import mlx.nn as nn
from mlx_lm.models import gated_delta, ssm

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns
from vllm_metal_lite.kernels.recurrence import QKNorm
from vllm_metal_lite.model.calls import observing
from vllm_metal_lite.model.seam.hooks import Hook, hooked, namespaces
from vllm_metal_lite.model.seam.state_cache import StateHandle
from vllm_metal_lite.recurrence.base import CausalConv, GatedDelta, StateSpace
from vllm_metal_lite.recurrence.tracked_columns import ColumnsOf, columns_of

# The arguments of mlx-lm's functions: GatedDelta has the same names, StateSpace the same order.
_DELTA = tuple(signature(gated_delta.gated_delta_update).parameters)
_SSM = tuple(signature(ssm.ssm_update).parameters)
_Pair = tuple[mx.array, mx.array]
_Normalized = tuple[_Pair, _Pair, QKNorm]  # q and k after the norm, q and k before, the norm


class ConvInput(mx.array):
    """Represents the input of a convolution: the rows of `state`, then `rows` (N, 1, C)."""

    def __init__(self, state: StateHandle, rows: mx.array) -> None:
        super().__init__(state)
        self.state, self.rows = state, rows

    def __getitem__(self, index: Any) -> "ConvInput":
        """A placeholder for the next state, which the recurrence has stored."""
        return self


class SiluColumns(ColumnsOf):
    """The result of a convolution that includes SiLU."""


class ShortConv(nn.Conv1d):
    """A convolution that takes a ConvInput.

    silu: whether the model applied SiLU to the result when it ran natively.
    """

    silu = False

    def __call__(self, x: mx.array) -> mx.array:
        return self._packed(x) if isinstance(x, ConvInput) else super().__call__(x)

    def _packed(self, x: ConvInput) -> mx.array:
        weight, channels = self.weight, x.rows.shape[-1]
        plain = (self.stride, self.padding, self.dilation, self.groups) == (1, 0, 1, channels)
        if not plain or x.rows.shape[1] != 1:
            raise NotImplementedError("a convolution that is not depthwise, causal and dense")
        conv = CausalConv(x.rows, weight, self.get("bias"), self.silu)
        rows = x.state.recurrence.causal_conv(x.state.key, conv)
        kind = SiluColumns if self.silu else ColumnsOf
        return kind(rows[:, None], Columns(rows, 0))


@contextmanager
def noting_silu(model: nn.Module) -> Iterator[None]:
    """While held, note which convolutions of a native forward are followed by SiLU."""
    results: list[tuple[nn.Module, mx.array]] = []

    def noting(conv: nn.Module, call: Callable[..., mx.array], x: mx.array) -> mx.array:
        results.append((conv, call(x)))
        return results[-1][1]

    def silu(original: Callable[..., mx.array], x: mx.array) -> mx.array:
        for conv, y in results:
            if y is x:
                conv.silu = True
        return original(x)

    convs = [module for module in model.modules() if isinstance(module, ShortConv)]
    with observing(convs, noting), hooked([(nn, "silu", silu)]):
        yield


class RecurrentHooks:
    """The functions of mlx-lm that a packed forward replaces.  They depend on the model only."""

    def __init__(self, model: nn.Module) -> None:
        replaced: dict[Callable, Callable] = {
            gated_delta.normalize_qk: _normalize_qk,
            gated_delta.gated_delta_update: _gated_delta,
            ssm.ssm_update: _state_space,
        }
        self._named = [(m, f, new) for f, new in replaced.items() for m in namespaces(model, f)]

    def __call__(self) -> Sequence[Hook]:
        """The hooks of one forward."""
        normalized: list[_Normalized] = []
        return [
            (mx, "concatenate", _concatenate),
            (mx, "split", _split),
            (nn, "silu", _silu),
            *((m, f.__name__, partial(new, normalized)) for m, f, new in self._named),
        ]


def _concatenate(
    original: Callable, arrays: Sequence[mx.array], *args: Any, **kwargs: Any
) -> mx.array:
    state = arrays[0] if arrays else None
    if isinstance(state, StateHandle):
        _, rows = arrays
        return ConvInput(state, rows)
    return original(arrays, *args, **kwargs)


def _split(
    original: Callable, x: mx.array, indices_or_sections: Any, axis: int = 0, **kwargs: Any
) -> list[mx.array]:
    """Split as mx.split does; parts of packed rows (N, 1, C) also know which columns they are."""
    parts = original(x, indices_or_sections, axis, **kwargs)
    if x.ndim != 3 or x.shape[1] != 1 or axis not in (-1, 2):
        return parts
    array, start, *rest = columns_of(x)
    for i, part in enumerate(parts):
        parts[i] = ColumnsOf(part, Columns(array, start, *rest))
        start += part.shape[-1]
    return parts


def _silu(original: Callable, x: mx.array) -> mx.array:
    return x if isinstance(x, SiluColumns) else original(x)


def _normalize_qk(
    normalized: list[_Normalized], original: Callable, q: mx.array, k: mx.array, **how: float
) -> _Pair:
    """mlx-lm's function, which also records q and k before the norm, for the fused kernel."""
    qk = original(q, k, **how)
    normalized[:] = [(qk, (q, k), QKNorm(**how))]
    return qk


def _gated_delta(
    normalized: list[_Normalized], original: Callable, *args: Any, **how: Any
) -> tuple[mx.array, Any]:
    given = dict(zip(_DELTA, args, strict=False), **how)
    state = given.pop("state", None)
    if type(state) is not StateHandle:
        return original(*args, **how)
    for ignored in ("mask", "use_kernel"):
        given.pop(ignored, None)
    for qk, raw, norm in normalized:
        if given["q"] is qk[0] and given["k"] is qk[1]:
            given |= {"q": raw[0], "k": raw[1], "norm": norm}
    return state.recurrence.gated_delta(state.key, GatedDelta(**given))[:, None], state


def _state_space(
    _: list[_Normalized], original: Callable, *args: Any, **how: Any
) -> tuple[mx.array, Any]:
    given = dict(zip(_SSM, args, strict=False), **how)
    state = given.get("state")
    if type(state) is not StateHandle:
        return original(*args, **how)
    low, high = given.get("time_step_limit", StateSpace.time_step_limit)
    arguments = [given[name] for name in _SSM[: _SSM.index("state")]]
    update = StateSpace(*[*arguments, (low, high)])
    return state.recurrence.state_space(state.key, update)[:, None], state
