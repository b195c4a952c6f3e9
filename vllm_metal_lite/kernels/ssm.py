"""Mamba 2's state space update over packed rows."""

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.gated_delta import linear_recurrence
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.recurrence import Gates, given


def ssm_update(
    x: Columns,
    b: Columns,
    c: Columns,
    dt: mx.array,
    a: mx.array,
    d: mx.array,
    states: mx.array,
    segments: mx.array,
    token: mx.array,
    *,
    num_groups: int,
    max_seqlen: int,
) -> tuple[mx.array, mx.array]:
    """The state space update over N packed rows -> y (N, H, P), the token.

    For each row t of a segment and each head, with S the state (P, D):

        S = S * exp(dt[t] * a) + dt[t] * x[t] b[t]^T;  y[t] = S c[t] + d * x[t]

    x: H heads of P.  b, c: num_groups groups of D; num_groups divides H.  dt: (N, H) float32, after
    its bias, softplus and limits.  a: (H,) float32, negative: -exp(A_log).  d: (H,).  states: the
    pool (slots, H, P, D) float32, written in place.  segments: from `plan_segments`.  max_seqlen:
    rows of the longest segment; a step of only short ones needs no chunks.  Sums are in float32, y
    is rounded once, to the type of x.  Rows of padding give zeros.

    Raises ValueError unless D is a multiple of 16 up to 256 and P of 8 up to 1024, and for shapes
    and types that do not fit together.  Source: Dao and Gu (2024), Transformers are SSMs.
    """
    if not a.shape == d.shape == states.shape[1:2]:
        raise ValueError(f"a {a.shape} and d {d.shape} are not ({states.shape[1]},)")
    gates = given(mx.exp(dt * a), dt, len(x.array), *states.shape[1::2])
    return linear_recurrence(
        c, b, x, gates, d, states, segments, token,
        num_k_heads=num_groups, max_seqlen=max_seqlen, delta=False,
    )  # fmt: skip


def fused_ssm_update(
    x: Columns, b: Columns, c: Columns, gates: Gates, d: mx.array, states: mx.array,
    segments: mx.array, token: mx.array, *, num_groups: int, max_seqlen: int,
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """As `ssm_update`, with `time_gates` (recurrence.py) in the place of dt and a."""
    if d.shape != states.shape[1:2]:
        raise ValueError(f"d {d.shape} is not ({states.shape[1]},)")
    return linear_recurrence(
        c, b, x, gates, d, states, segments, token,
        num_k_heads=num_groups, max_seqlen=max_seqlen, delta=False,
    )  # fmt: skip
