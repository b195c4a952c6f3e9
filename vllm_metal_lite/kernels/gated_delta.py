"""The gated delta rule over packed rows, which also computes Mamba 2's state space update."""

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns, columns_template
from vllm_metal_lite.kernels.launch import Kernel, Template, check_array
from vllm_metal_lite.kernels.recurrence import Gates, QKNorm
from vllm_metal_lite.kernels.store import TICKET

_GATED_DELTA = Kernel(
    "gated_delta",
    ["q", "k", "v", "gates", "beta", "a_log", "bias", "skip", "segments", "states", "ticket"],
    ["y", "next_ticket"],
)

# The most SIMD groups of a threadgroup; and the most for tiles of wide keys.
_SIMDGROUPS, _WIDE_SIMDGROUPS = 4, 8


def gated_delta(
    q: Columns,
    k: Columns,
    v: Columns,
    gates: Gates,
    states: mx.array,
    segments: mx.array,
    ticket: mx.array,
    *,
    num_k_heads: int,
    max_seqlen: int,
    norm: QKNorm | None = None,
    skip: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule over N packed rows -> y (N, Hv, Dv), the ticket.

    For each row t of a segment and each head of v, with S the state (Dv, Dk):

        S = S * gate[t];  S = S + beta[t] * (v[t] - S k[t]) k[t]^T;  y[t] = S q[t]

    With skip (Hv,), computes the state space update instead, whose x, B and C are v, k and q:

        S = S * gate[t];  S = S + beta[t] * v[t] k[t]^T;  y[t] = S q[t] + skip * v[t]

    q, k: num_k_heads heads of Dk, normalised and scaled by the caller unless norm is given;
    num_k_heads divides Hv.  v: Hv heads of Dv.  states: the store (slots, Hv, Dv, Dk) float32,
    written in place.  segments: from `pack_segments`.  max_seqlen: 1 if no segment has more rows,
    and then no tiles are loaded.  Neither max_seqlen nor how a prompt is cut changes the sums.
    Sums are in float32, y is rounded once, to the type of v.  Rows of padding give zeros.

    Sizes and types: those for which `recurrence_problem` finds none.  Sources: Yang, Kautz and
    Hatamizadeh (2024), Gated Delta Networks; Dao and Gu (2024), Transformers are SSMs.
    """
    rows, dtype = len(v.array), v.array.dtype
    _, v_heads, v_dim, k_dim = states.shape
    check_array("states", states, states.shape, mx.float32)
    check_array("skip", skip, (v_heads,))
    arrays, of_gates = gates.launch(rows, v_heads, k_dim)
    tiles = max_seqlen > 1
    # All simdgroups load a tile, those without rows of a state too.
    tiled = _WIDE_SIMDGROUPS if k_dim > 128 else _SIMDGROUPS
    simdgroups = tiled if tiles else min(_SIMDGROUPS, v_dim // 8)
    template: Template = columns_template("q", q, rows, num_k_heads * k_dim, dtype)
    template |= columns_template("k", k, rows, num_k_heads * k_dim, dtype)
    template |= columns_template("v", v, rows, v_heads * v_dim, dtype)
    template |= of_gates | QKNorm.template(norm)
    template |= {"T": dtype, "K_HEADS": num_k_heads, "V_HEADS": v_heads}
    template |= {"K_DIM": k_dim, "V_DIM": v_dim, "DELTA": skip is None, "SKIP": skip is not None}
    template |= {"TILES": tiles, "SIMDGROUPS": simdgroups}
    inputs = [q.array, k.array, v.array, *arrays, skip, segments, states, ticket]
    grid, threads = (-(-v_dim // (8 * simdgroups)), v_heads, segments.shape[0]), 32 * simdgroups
    outputs = [((rows, v_heads, v_dim), dtype), TICKET]
    y, ticket = _GATED_DELTA(inputs, template, grid, threads, outputs)
    return y, ticket
