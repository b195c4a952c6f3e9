"""The interface of recurrent layers over packed rows, and the operations of mlx-lm's layers.

Rows are those of a packed step, in mlx-lm's shapes: (N, 1, ...).  Each segment continues its own
state, which `key` names in the state store.
"""

from dataclasses import dataclass
from typing import Protocol

from mlx_lm.models.gated_delta import compute_g, compute_lower_bound_g

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.recurrence import QKNorm
from vllm_metal_lite.kv.state_store import Key
from vllm_metal_lite.specs import ConvShape, RecurrenceShape


@dataclass(frozen=True)
class CausalConv:
    """A depthwise causal convolution.  x: (N, 1, C).  weight: (C, K, 1).  bias: (C,) or None.

    silu: whether SiLU follows.
    """

    x: mx.array
    weight: mx.array
    bias: mx.array | None
    silu: bool

    @property
    def shape(self) -> ConvShape:
        channels, size, _ = self.weight.shape
        return ConvShape(channels, size, self.bias is not None, self.silu, self.x.dtype)


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule, with the arguments of mlx-lm's `gated_delta_update`.

    q, k: (N, 1, Hk, Dk), before `norm`, if there is one.  v: (N, 1, Hv, Dv).  a: (N, 1, Hv), or
    (N, 1, Hv, Dk) for a gate per column of the state.  b: (N, 1, Hv).  A_log, dt_bias: shaped
    like `a` without its (N, 1); A_log may broadcast.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    a: mx.array
    b: mx.array
    A_log: mx.array
    dt_bias: mx.array
    lower_bound: float | None = None
    allow_neg_eigval: bool = False
    norm: QKNorm | None = None

    @property
    def is_vector(self) -> bool:
        return self.a.ndim == 4

    @property
    def shape(self) -> RecurrenceShape:
        (k_heads, k_dim), (v_heads, v_dim) = self.k.shape[2:], self.v.shape[2:]
        return RecurrenceShape(k_heads, v_heads, k_dim, v_dim, self.v.dtype, vector=self.is_vector)

    @property
    def gates(self) -> mx.array:
        """The factors of the state, float32, with the shape of `a`."""
        if self.lower_bound is None:
            gates = compute_g(self.A_log, self.a, self.dt_bias)
        else:
            gates = compute_lower_bound_g(self.A_log, self.a, self.dt_bias, self.lower_bound)
        return gates.astype(mx.float32)


@dataclass(frozen=True)
class StateSpace:
    """Mamba 2's state space update, with the arguments of mlx-lm's `ssm_update`.

    x: (N, 1, H, P).  b, c: (N, 1, G, D).  dt: (N, 1, H), before its bias.  A_log, d, dt_bias: (H,).
    """

    x: mx.array
    A_log: mx.array
    b: mx.array
    c: mx.array
    d: mx.array
    dt: mx.array
    dt_bias: mx.array
    time_step_limit: tuple[float, float] = (0.001, 100.0)

    @property
    def shape(self) -> RecurrenceShape:
        (groups, k_dim), (heads, v_dim) = self.b.shape[2:], self.x.shape[2:]
        return RecurrenceShape(groups, heads, k_dim, v_dim, self.x.dtype, delta=False)


class StepRecurrence(Protocol):
    """One step's pass over the recurrent layers of a model.  Each state is used once."""

    def causal_conv(self, key: Key, conv: CausalConv) -> mx.array:
        """Returns the rows (N, C) of the convolution."""

    def gated_delta(self, key: Key, delta: GatedDelta) -> mx.array:
        """Returns the rows (N, Hv, Dv) of the rule."""

    def state_space(self, key: Key, update: StateSpace) -> mx.array:
        """Returns the rows (N, H, P) of the update."""
