"""Our recurrent kernels in mlx-lm's models, as a batch: what mlx-lm would do on a Mac.

mlx-lm's kernels of the gated delta rule and of the state space update are Metal's only.  On CUDA
and on a CPU it loops over tokens, or computes chunks with general operations, so a comparison there
would compare kernels that no Mac uses.  `fair_kernels` gives mlx-lm ours instead: one
launch a layer for a batch of padded sequences, states in and out once, as its own kernels move
them.  The short convolution stays mlx-lm's: its operations are kernels on every device.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np

from tools.bench.lib.mlx_lm import native
from vllm_metal_lite import backend
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.gated_delta import gated_delta, recurrence_problem
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.recurrence import given
from vllm_metal_lite.kernels.segments import EMPTY, PADDING
from vllm_metal_lite.model.loader import LoadedModel

# isort: split
from mlx_lm.generate import generation_stream
from mlx_lm.models import gated_delta as theirs_delta
from mlx_lm.models import ssm as theirs_ssm
from mlx_lm.models.cache import ArraysCache, LRUPromptCache

mx = backend.mx

_UPDATE, _SSM = theirs_delta.gated_delta_update, theirs_ssm.ssm_update
_INSERT, _MERGE = LRUPromptCache.insert_cache, ArraysCache.merge


@cache
def _whole(batch: int, length: int) -> mx.array:
    """Segments (S, 4) of `kernels/segments.py`: sequence i is rows [i L, i L + L)."""
    i = np.arange(batch, dtype=np.int32)
    segments = np.stack([i * length, i, (i + 1) * length, i], axis=1)
    end = batch * length  # nothing, so that MLX passes the array as it passes longer ones
    nothing = np.array([[end, PADDING, end, EMPTY]], np.int32)
    return mx.array(np.concatenate([segments, nothing]))


def _masked(mask: mx.array) -> mx.array:
    """The same where only mask (B, L) is of the sequences, whose tokens lie together."""
    batch, length = mask.shape
    i = mx.arange(batch)
    start = i * length
    begin = start + mx.argmax(mask, axis=1).astype(mx.int32)
    end = begin + mask.sum(axis=1).astype(mx.int32)
    padding, empty = mx.full(batch, PADDING, mx.int32), mx.full(batch, EMPTY, mx.int32)
    rows = [
        mx.stack(columns, axis=1)
        for columns in (
            (begin, i, end, i), (start, padding, begin, empty),
            (end, padding, start + length, empty),
        )
    ]  # fmt: skip
    return mx.concatenate(rows)


class _Launches:
    """The functions that take the place of mlx-lm's."""

    def __init__(self) -> None:
        # All launches take the token of the one before.  States are written in place, and MLX
        # orders launches by the arrays that they name as outputs.
        self._token = new_token()
        mx.eval(self._token)  # a server computes in another thread, which has not this stream
        self._mask: mx.array | None = None
        self._segments = self._token

    def _segments_of(self, batch: int, length: int, mask: mx.array | None) -> mx.array:
        if mask is None:
            return _whole(batch, length)
        if mask is not self._mask:  # one for all layers of a forward
            self._mask, self._segments = mask, _masked(mask)
        return self._segments

    def _done(self, y: mx.array, like: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        return y.reshape(like.shape), mx.depends([states], [self._token])[0]

    def gated_delta_update(
        self, q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, A_log: mx.array,
        dt_bias: mx.array, state: mx.array | None = None, mask: mx.array | None = None,
        *, lower_bound: float | None = None, allow_neg_eigval: bool = False, **how: Any,
    ) -> tuple[mx.array, mx.array]:  # fmt: skip
        """As mlx-lm's: q, k (B, L, Hk, Dk), v (B, L, Hv, Dv) -> y like v, states."""
        batch, length, k_heads, k_dim = k.shape
        v_heads, v_dim = v.shape[2:]
        if recurrence_problem(k_dim, v_dim, v.dtype):
            return _UPDATE(
                q, k, v, a, b, A_log, dt_bias, state, mask,
                lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval, **how,
            )  # fmt: skip
        beta = mx.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0)
        if lower_bound is None:
            gates = theirs_delta.compute_g(A_log, a, dt_bias)
        else:
            gates = theirs_delta.compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
        if state is None:
            state = mx.zeros((batch, v_heads, v_dim, k_dim))
        rows = batch * length
        y, self._token = gated_delta(
            *(Columns(x.reshape(rows, -1), 0) for x in (q, k, v)),
            given(
                gates.reshape(rows, *gates.shape[2:]).astype(mx.float32),
                beta.reshape(rows, v_heads),
            ),
            state, self._segments_of(batch, length, mask), self._token,
            num_k_heads=k_heads, max_seqlen=length,
        )  # fmt: skip
        return self._done(y, v, state)

    def ssm_update(
        self, hidden_states: mx.array, A_log: mx.array, B: mx.array, C: mx.array, D: mx.array,
        dt: mx.array, dt_bias: mx.array, state: mx.array | None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0), mask: mx.array | None = None,
        lengths: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:  # fmt: skip
        """As mlx-lm's: hidden_states (b, L, H, P), B and C (b, L, G, D) -> y, states.

        lengths says no more than mask, which also holds where mlx-lm is not given lengths.
        """
        x, (batch, length, heads, dim) = hidden_states, hidden_states.shape
        groups, state_dim = B.shape[2:]
        if recurrence_problem(state_dim, dim, x.dtype):
            return _SSM(
                x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths
            )  # fmt: skip
        if state is None:
            state = mx.zeros((batch, heads, dim, state_dim))
        rows = batch * length
        steps = theirs_ssm.compute_dt(dt, dt_bias, time_step_limit).reshape(rows, heads)
        y, self._token = gated_delta(
            *(Columns(part.reshape(rows, -1).astype(x.dtype), 0) for part in (C, B, x)),
            given(mx.exp(steps * -mx.exp(A_log.astype(mx.float32))), steps), state,
            self._segments_of(batch, length, mask), self._token,
            num_k_heads=groups, max_seqlen=length, skip=D,
        )  # fmt: skip
        return self._done(y, x, state)


# States are written in place.  Where mlx-lm keeps or takes a cache without a copy, make one.
def _copy_states(layer: ArraysCache) -> None:
    layer.cache = [None if a is None else a * 1 for a in layer.cache]


def _insert(
    kept: LRUPromptCache, model: Any, tokens: list[int], prompt_cache: list[Any], **kind: Any
) -> None:
    recurrent = [layer for layer in prompt_cache if isinstance(layer, ArraysCache)]
    with mx.stream(generation_stream):  # that of the next step, which writes after this
        for layer in recurrent:
            _copy_states(layer)
        mx.async_eval([a for layer in recurrent for a in layer.cache if a is not None])
    _INSERT(kept, model, tokens, prompt_cache, **kind)


def _merge(caches: list[ArraysCache]) -> ArraysCache:
    merged = _MERGE(caches)
    if len(caches) == 1:
        _copy_states(merged)
    return merged


def loops_over_tokens(model: LoadedModel) -> bool:
    """Whether mlx-lm's code of a model calls what `fair_kernels` replaces."""
    modules = {type(m).__module__ for m in native(model).modules()}
    return any(
        function in (_UPDATE, _SSM)
        for name in modules for function in vars(sys.modules[name]).values()
        if callable(function)
    )  # fmt: skip


@contextmanager
def fair_kernels() -> Iterator[None]:
    """While open, mlx-lm's models launch our kernels of recurrent layers."""
    launches = _Launches()
    ours: dict[str, tuple[Callable, Callable]] = {
        "gated_delta_update": (_UPDATE, launches.gated_delta_update),
        "ssm_update": (_SSM, launches.ssm_update),
    }
    with ExitStack() as stack:
        if backend.is_cpu():
            from metal.host import installed

            stack.enter_context(installed(writable_inputs=["states"]))
        stack.enter_context(patch.object(LRUPromptCache, "insert_cache", _insert))
        stack.enter_context(patch.object(ArraysCache, "merge", staticmethod(_merge)))
        for name, module in list(sys.modules.items()):
            for function, (original, mine) in ours.items():
                if name.startswith("mlx_lm.models.") and vars(module).get(function) is original:
                    stack.enter_context(patch.object(module, function, mine))
        yield
