"""The operations of a model: attention, recurrences, rotations, norms.

Observed while packed steps by the reference are built: the modules of models differ, but all call
the same functions.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.attention.base import AttentionCall
from vllm_metal_lite.attention.sdpa.reference import ReferenceStepAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.state_store import Key
from vllm_metal_lite.model.layer_weights import MIXTURES
from vllm_metal_lite.model.packed import PackedForward
from vllm_metal_lite.model.seam.hooks import Hook, ScalingAt, hooked
from vllm_metal_lite.recurrence.reference import ReferenceRecurrence
from vllm_metal_lite.specs import AttentionShape, RecurrentShape, RopeShape


class Usage:
    """The shapes of a model's operations.

    recurrences: the shapes of recurrent layers that work on packed rows.  hidden_sizes: the sizes
    of normalised rows, except heads.  experts_per_token: the most experts that one token uses.
    """

    def __init__(self) -> None:
        self.shapes: dict[AttentionShape, None] = {}
        self.recurrences: dict[RecurrentShape, None] = {}
        self.hidden_sizes: dict[int, None] = {}
        self.experts_per_token = 0
        self._head_norms: dict[int, float] = {}  # head size -> eps
        self._ropes: dict[tuple[int, RopeShape], None] = {}
        # The heads that were scaled last: (array, number of leading elements scaled, factor).
        self._scaled: tuple[mx.array, int, float] | None = None

    @property
    def ropes(self) -> tuple[RopeShape, ...]:
        found = {replace(r, eps=self._head_norms.get(head_dim)) for head_dim, r in self._ropes}
        return tuple(sorted(found, key=str))

    def recorded(self, forward: PackedForward) -> PackedForward:
        """The same forward, but each call records its operations here."""
        recurrence = ReferenceRecurrence
        hooks: list[Hook] = [
            (ReferenceStepAttention, "attend", self._attend),
            *((recurrence, n, self._recur) for n in ("causal_conv", "gated_delta", "state_space")),
            *((mixture, "__call__", self._mix) for mixture in MIXTURES),
            (mx.fast, "rms_norm", self._rms_norm),
            (mx.fast, "rope", self._rope),
            (mx.array, "at", self._at),
            *((mx.array, name, self._mul) for name in ("__mul__", "__rmul__")),
        ]

        def recording(*arguments: Any) -> tuple[mx.array, mx.array | None]:
            with hooked(hooks):
                result = forward(*arguments)
            self._scaled = None
            return result

        return recording

    def _attend(
        self, original: Callable, step: ReferenceStepAttention, q: mx.array, call: AttentionCall
    ) -> mx.array:
        spec, scores = step.store.specs[call.layer], call.scores
        shape = AttentionShape(
            num_heads=q.shape[1],
            num_kv_heads=spec.num_kv_heads,
            k_head_dim=spec.k_head_dim,
            v_head_dim=spec.v_head_dim,
            dtype=spec.dtype,
            window=scores.window,
            softcap=scores.softcap,
            sinks=scores.sinks is not None,
            latent=call.q_pe is not None,
            attention_chunk=call.attention_chunk,
        )
        self.shapes[shape] = None
        return original(step, q, call)

    def _recur(
        self, original: Callable, step: ReferenceRecurrence, key: Key, operation: Any
    ) -> mx.array:
        self.recurrences[operation.shape] = None
        return original(step, key, operation)

    def _mix(
        self, original: Callable, layer: nn.Module, x: mx.array, indices: mx.array, **how: Any
    ) -> mx.array:
        self.experts_per_token = max(self.experts_per_token, indices.shape[-1])
        return original(layer, x, indices, **how)

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
        is_scaled = scaled is x and count == dims
        rope = RopeShape(dims, *angles, factor=factor if is_scaled else 1.0)
        self._ropes[x.shape[-1], rope] = None
        return original(x, dims, **how)

    def _note(self, scaled: mx.array, dims: int, factor: float) -> mx.array:
        self._scaled = scaled, dims, factor
        return scaled

    def _at(self, original: Callable, x: mx.array) -> ScalingAt:
        return ScalingAt(x, original(x), self._note)

    def _mul(self, original: Callable[..., Any], x: mx.array, y: Any) -> Any:
        value = original(x, y)
        heads = isinstance(y, float) and x.ndim == 4
        return self._note(value, x.shape[-1], y) if heads else value
