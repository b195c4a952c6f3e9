"""The gated delta rule over packed rows."""

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.common import head_size_problem, unused
from vllm_metal_lite.kernels.launch import Kernel, Template
from vllm_metal_lite.kernels.segments import check_pool

_GATED_DELTA = Kernel(
    "gated_delta",
    ["q", "k", "v", "gates", "beta", "skip", "segments", "states", "token"],
    ["y", "next_token"],
)

# Rows that are computed at once: a state after a multiple of so many rows of its segment does not
# depend on how the segment is cut.
CHUNK = 8
# The largest key: a chunk's keys lie in threadgroup memory.
MAX_K_DIM = 256
_MAX_V_DIM = 1024
# Simdgroups of a threadgroup, at most: each prepares a row of a chunk for all.
_SIMDGROUPS = 8


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gates: mx.array,
    beta: mx.array,
    states: mx.array,
    segments: mx.array,
    token: mx.array,
    *,
    max_seqlen: int,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule over packed rows -> y (N, Hv, Dv), the token.

    For each row t of a segment and each head of v, with S the state (Dv, Dk):

        S = S * gates[t];  S = S + beta[t] * (v[t] - S k[t]) k[t]^T;  y[t] = S q[t]

    q, k: (N, Hk, Dk), normalised and scaled by the caller; Hk divides Hv.  v: (N, Hv, Dv).  gates:
    float32, (N, Hv), or (N, Hv, Dk) for a gate per column of S (Kimi).  beta: (N, Hv).  states: the
    pool (slots, Hv, Dv, Dk) float32, written in place.  segments: from `plan_segments`.
    max_seqlen: rows of the longest segment; a step of only short ones needs no chunks.  Sums are in
    float32, y is rounded once.  Rows of padding give zeros.

    Dk and Dv are multiples of 8, Dk at most 256, else ValueError; so for shapes that do not fit
    together.  Source: Yang, Kautz and Hatamizadeh (2024), Gated Delta Networks.
    """
    return linear_recurrence(
        q, k, v, gates, beta, None, states, segments, token, max_seqlen, delta=True
    )


def linear_recurrence(
    q: mx.array, k: mx.array, v: mx.array, gates: mx.array, beta: mx.array,
    skip: mx.array | None, states: mx.array, segments: mx.array, token: mx.array,
    max_seqlen: int, delta: bool,
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """The recurrence with (delta) or without the delta rule's correction; skip: (Hv,) or None."""
    (rows, k_heads, k_dim), (_, v_heads, v_dim) = k.shape, v.shape
    if q.shape != k.shape or v.shape[0] != rows or v_heads % k_heads:
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} do not fit together")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are of unlike types: {q.dtype}, {k.dtype}, {v.dtype}")
    vector = gates.shape == (rows, v_heads, k_dim)
    if not (vector or gates.shape == (rows, v_heads)) or gates.dtype != mx.float32:
        raise ValueError(
            f"gates {gates.shape} {gates.dtype} are not ({rows}, {v_heads}) or "
            f"({rows}, {v_heads}, {k_dim}) float32"
        )
    if beta.shape != (rows, v_heads):
        raise ValueError(f"beta {beta.shape} is not ({rows}, {v_heads})")
    if problem := head_size_problem((k_dim,), MAX_K_DIM) or head_size_problem((v_dim,), _MAX_V_DIM):
        raise ValueError(problem)
    check_pool(states, (v_heads, v_dim, k_dim), mx.float32)
    simdgroups = min(_SIMDGROUPS, v_dim // 8)
    template: Template = {
        "T": q.dtype, "B": beta.dtype, "K_HEADS": k_heads, "V_HEADS": v_heads,
        "K_DIM": k_dim, "V_DIM": v_dim,
        "DELTA": delta, "VECTOR": vector, "SKIP": skip is not None,
        "CHUNKS": max_seqlen >= CHUNK, "SIMDGROUPS": simdgroups,
    }  # fmt: skip
    if gates.size < 8:  # MLX passes such an array in an address space that the kernel does not take
        gates = mx.concatenate([gates.reshape(-1), unused()])
    y, token = _GATED_DELTA(
        [q, k, v, gates, beta, unused() if skip is None else skip,
         segments, states, token],
        template, (-(-v_dim // (8 * simdgroups)), v_heads, segments.shape[0]), 32 * simdgroups,
        [v.shape, (1,)], [v.dtype, mx.float32],
    )  # fmt: skip
    return y, token
