"""The inputs of `gated_delta` for gates, keys and queries.

The kernel computes gates and beta in float32 from columns of a layer's projection.  Gates per
column of the state are computed before the launch.
"""

from typing import NamedTuple

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns, columns_template
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, Template, bits, check_array

_GIVEN, _SOFTPLUS, _BOUNDED, _TIME = range(4)  # as in metal/recurrence.h
_LARGEST = 3e38  # replaces infinite limits, because a compiler may assume finite numbers


class QKNorm(NamedTuple):
    """q and k of a head become inv_scale * q / sqrt(sum(q^2) + eps) and k / sqrt(sum(k^2) + eps),
    as by `normalize_qk` of mlx-lm with inv_scale = head size^-0.5."""

    inv_scale: float
    eps: float

    @staticmethod
    def template(norm: "QKNorm | None") -> Template:
        scale, eps = norm or (1.0, 0.0)
        return {"NORM": norm is not None, "EPS": bits(eps), "Q_SCALE": bits(scale)}


class Gates(NamedTuple):
    """The gate and beta of each row and head, or the columns from which the kernel computes them.

    gates: V columns, or V * K for a gate per column of the state (vector).  beta: V columns, which
    the kernel does not read if it computes beta from gates.  a_log, bias: (V,), if the kernel
    computes the gate.  beta_scale: 0 if beta is final; otherwise beta is a logit, and
    beta_scale multiplies its sigmoid.  low, high: of make_gates in metal/recurrence.h; not below 0.
    """

    gates: Columns
    beta: Columns
    vector: bool = False
    kind: int = _GIVEN
    a_log: mx.array | None = None
    bias: mx.array | None = None
    beta_scale: int = 0
    low: float = 0.0
    high: float = 0.0

    def launch(self, rows: int, v_heads: int, k_dim: int) -> tuple[list[mx.array | None], Template]:
        """The inputs gates, beta, a_log and bias, and the template values of all."""
        width = v_heads * k_dim if self.vector else v_heads
        check_array("a_log", self.a_log, (v_heads,))
        check_array("bias", self.bias, (v_heads,))
        dtype, of_beta = self.gates.array.dtype, self.beta.array.dtype
        template: Template = columns_template("g", self.gates, rows, width, dtype)
        template |= columns_template("b", self.beta, rows, v_heads, of_beta)
        template |= {"G": dtype, "B": of_beta, "VECTOR": self.vector, "GATE": self.kind}
        template |= {"BETA": self.beta_scale, "LOW": bits(self.low), "HIGH": bits(self.high)}
        columns = _long(self.gates.array), _long(self.beta.array)
        return [*columns, self.a_log, self.bias], template


def delta_gates(
    a: Columns,
    b: Columns,
    a_log: mx.array,
    dt_bias: mx.array,
    *,
    lower_bound: float | None = None,
    beta_scale: int = 1,
) -> Gates:
    """gate = exp(-exp(a_log) * softplus(a + dt_bias)), beta = beta_scale * sigmoid(b).

    lower_bound: gate = exp(lower_bound * sigmoid(exp(a_log) * (a + dt_bias))) instead.  Source:
    `compute_g`, `compute_lower_bound_g` and `gated_delta_update` of mlx-lm.
    """
    kind = _SOFTPLUS if lower_bound is None else _BOUNDED
    return Gates(a, b, False, kind, a_log, dt_bias, beta_scale, low=-(lower_bound or 0.0))


def column_gates(gates: mx.array, b: Columns, *, beta_scale: int = 1) -> Gates:
    """A gate (N, V, K) float32 for each column of the state, given; beta as in `delta_gates`."""
    return Gates(Columns(gates.reshape(len(gates), -1), 0), b, True, beta_scale=beta_scale)


def time_gates(
    dt: Columns, a_log: mx.array, dt_bias: mx.array, limits: tuple[float, float]
) -> Gates:
    """beta = softplus(dt + dt_bias) within limits, gate = exp(-exp(a_log) * beta).

    Source: `compute_dt` and `ssm_update` of mlx-lm.
    """
    # A softplus is not negative, and no template value may be.
    low, high = (max(0.0, min(_LARGEST, limit)) for limit in limits)
    return Gates(dt, dt, False, _TIME, a_log, dt_bias, low=low, high=high)


def _long(array: mx.array) -> mx.array:
    """At least MIN_ELEMENTS: the kernel takes these inputs in the usual address space only."""
    if array.size >= MIN_ELEMENTS:
        return array
    return mx.concatenate([array.reshape(-1), mx.zeros(MIN_ELEMENTS, array.dtype)])
