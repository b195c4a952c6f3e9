"""Mamba 2's state space update over packed rows."""

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.gated_delta import linear_recurrence


def ssm_update(
    x: mx.array,
    b: mx.array,
    c: mx.array,
    dt: mx.array,
    a: mx.array,
    d: mx.array,
    states: mx.array,
    segments: mx.array,
    token: mx.array,
    *,
    max_seqlen: int,
) -> tuple[mx.array, mx.array]:
    """The state space update over packed rows -> y (N, H, P), the token.

    For each row t of a segment and each head, with S the state (P, D):

        S = S * exp(dt[t] * a) + dt[t] * x[t] b[t]^T;  y[t] = S c[t] + d * x[t]

    x: (N, H, P).  b, c: (N, G, D); G groups divide the H heads.  dt: (N, H) float32, after its
    bias, softplus and limits.  a: (H,) float32, negative: -exp(A_log).  d: (H,).  states: the pool
    (slots, H, P, D) float32, written in place.  segments: from `plan_segments`.  max_seqlen: rows
    of the longest segment.  Sums are in float32, y is rounded once.  Rows of padding give zeros.

    P and D are multiples of 8, D at most 256, else ValueError; so for shapes that do not fit
    together.  Source: Dao and Gu (2024), Transformers are SSMs.
    """
    if d.shape != a.shape or a.shape != x.shape[1:2]:
        raise ValueError(f"a {a.shape} and d {d.shape} are not ({x.shape[1]},)")
    skip = d.astype(mx.float32)
    return linear_recurrence(
        c, b, x, mx.exp(dt * a), dt, skip, states, segments, token, max_seqlen, delta=False
    )
