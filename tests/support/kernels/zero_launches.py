"""Launches each kernel on lazy zeros of a given size.

Nothing is computed, so real sizes cost nothing.
"""

from typing import NamedTuple

from tests.support.kernels.recurrent_cases import given
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.arguments import LayerStore, RMSNorm, new_ticket
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.causal_conv import causal_conv
from vllm_metal_lite.kernels.decode import DecodePlan, merge_partitions, paged_decode
from vllm_metal_lite.kernels.expert_topk import Routing, expert_topk
from vllm_metal_lite.kernels.experts import (
    Activation,
    Experts,
    ExpertWeight,
    expert_mlp,
    expert_sum,
)
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.latent_attention import latent_attention
from vllm_metal_lite.kernels.latent_write import NewLatents, latent_write
from vllm_metal_lite.kernels.new_rows import Columns, NewRows, Rope
from vllm_metal_lite.kernels.prefill import varlen_prefill
from vllm_metal_lite.kernels.recurrence import QKNorm, delta_gates, time_gates
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.kernels.shared_prefix import SharedPrefixResult, shared_prefix
from vllm_metal_lite.kernels.skinny_gemm import skinny_gemm
from vllm_metal_lite.kernels.weights import QuantisedWeight, quantised
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.specs import Quantisation

ROWS, SLOTS, STATE_SLOTS, BLOCKS, BLOCK_SIZE = 16, 4096, 20, 64, 16


class Heads(NamedTuple):
    """One layer's attention, as models have it."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    softcap: float | None = None
    factor: float = 1.0  # of its rotation


def _ints(*shape: int) -> mx.array:
    return mx.zeros(shape, mx.int32)


def _store_of(spec: LayerSpec) -> LayerStore:
    rows = spec.k_row, spec.v_row
    arrays = (mx.zeros((SLOTS, spec.num_kv_heads, r.width), r.kept_dtype) for r in rows)
    return LayerStore(*arrays, new_ticket(), spec, BLOCK_SIZE)


def _store(of: Heads, dtype: mx.Dtype, bits: int | None = None) -> LayerStore:
    return _store_of(LayerSpec(of.kv_heads, of.dim, of.dim, dtype, of.window, bits=bits))


def _new_rows(of: Heads, dtype: mx.Dtype, rows: int) -> NewRows:
    width = (of.heads + 2 * of.kv_heads) * of.dim
    joined = mx.zeros((rows, width), dtype)
    columns = [Columns(joined, n * of.dim) for n in (0, of.heads, of.heads + of.kv_heads)]
    norm = RMSNorm(mx.zeros(of.dim, dtype), 1e-6)
    turn = Rope(of.dim, False, 1e6, 1.0, None, of.factor)
    return NewRows(*columns, of.heads, turn, norm, norm)


def decode(
    of: Heads,
    dtype: mx.Dtype,
    *,
    bits: int | None = None,
    fused: bool = False,
    prefix: bool = False,
    splits: int = 1,
    simdgroups: int = 8,
) -> None:
    q = _new_rows(of, dtype, ROWS) if fused else mx.zeros((ROWS, of.heads, of.dim), dtype)
    parts = mx.zeros((ROWS, of.heads, 4, of.dim)), mx.zeros((ROWS, of.heads, 4)), _ints(ROWS)
    shared = SharedPrefixResult(*parts) if prefix else None
    how = {"scale": of.dim**-0.5, "window": of.window}
    how |= {"softcap": of.softcap, "plan": DecodePlan(splits, simdgroups), "prefix": shared}
    paged_decode(q, _ints(ROWS, BLOCKS), _ints(ROWS), _store(of, dtype, bits), **how)


def prefill(of: Heads, dtype: mx.Dtype, *, bits: int | None = None) -> None:
    q = mx.zeros((512, of.heads, of.dim), dtype)
    where = _ints(8, BLOCKS), _ints(9), _ints(8), _ints(40, 2)
    how = {"scale": of.dim**-0.5, "window": of.window}
    varlen_prefill(q, *where, _store(of, dtype, bits), softcap=of.softcap, **how)


def latents(
    heads: int,
    latent_dim: int,
    rope: int,
    dtype: mx.Dtype,
    *,
    bits: int | None = None,
    splits: int = 1,
) -> None:
    store = _store_of(LayerSpec(1, latent_dim, rope, dtype, bits=bits))
    q, q_pe = (mx.zeros((ROWS, heads, dim), dtype) for dim in (latent_dim, rope))
    where = _ints(ROWS, BLOCKS), _ints(ROWS + 1), _ints(ROWS), _ints(40, 2)
    how = {"scale": 0.1, "splits": splits}
    latent_attention(q, q_pe, *where, store, **how)


def latent_rows(
    heads: int, latent_dim: int, rope: int, dtype: mx.Dtype, *, bits: int | None = None
) -> None:
    store = _store_of(LayerSpec(1, latent_dim, rope, dtype, bits=bits))
    q, kv = mx.zeros((ROWS, heads * 256), dtype), mx.zeros((ROWS, latent_dim + rope), dtype)
    norm, new_rope = RMSNorm(mx.zeros(latent_dim, dtype), 1e-6), Rope(rope, True, 1e6, 1.0, None)
    columns = Columns(kv, 0), Columns(kv, latent_dim)
    new = NewLatents(Columns(q, 192), 256, heads, *columns, norm, new_rope)
    latent_write(new, _ints(ROWS), _ints(ROWS), store)


def prefix(of: Heads, dtype: mx.Dtype, *, fused: bool = False, bits: int | None = None) -> None:
    q = _new_rows(of, dtype, ROWS) if fused else mx.zeros((ROWS, of.heads, of.dim), dtype)
    where = _ints(ROWS, BLOCKS), _ints(ROWS), _ints(1), _ints(ROWS)
    how = {"scale": of.dim**-0.5, "softcap": of.softcap}
    shared_prefix(q, *where, _store(of, dtype, bits), splits=4, **how)


def write(of: Heads, dtype: mx.Dtype, *, bits: int | None = None) -> None:
    rows = [mx.zeros((ROWS, of.kv_heads, of.dim), dtype) for _ in "kv"]
    kv_write(*rows, _ints(ROWS), _store(of, dtype, bits))


def gather(of: Heads, dtype: mx.Dtype, *, bits: int | None = None) -> None:
    kv_gather(_ints(512), _store(of, dtype, bits))


def rope(of: Heads, dtype: mx.Dtype, *, rows: int = ROWS, bits: int | None = None) -> None:
    where = _ints(rows), _ints(rows)
    rope_write(_new_rows(of, dtype, rows), *where, _store(of, dtype, bits))


def add_norm(dim: int, dtype: mx.Dtype, *, post: bool = False) -> None:
    x, weight = mx.zeros((ROWS, dim), dtype), mx.zeros(dim, dtype)
    add_rms_norm(x, x, weight, 1e-6, RMSNorm(weight, 1e-6) if post else None)


def rows_of(of: Heads, dtype: mx.Dtype) -> None:
    gather_rows(mx.zeros((64, of.heads, of.dim), dtype), _ints(128))


def product(
    rows: int,
    depth: int,
    outputs: int,
    dtype: mx.Dtype,
    how: str = "",
    quantisation: Quantisation | None = None,
) -> None:
    x, weight = mx.zeros((rows, depth), dtype), mx.zeros((outputs, depth), dtype)
    width = outputs // 2 if "glu" in how else outputs
    skinny_gemm(
        x,
        quantised(weight, quantisation) if quantisation else weight,
        norm=RMSNorm(mx.zeros(depth, dtype), 1e-6) if "norm" in how else None,
        residual=mx.zeros((rows, width), dtype) if "residual" in how else None,
        bias=mx.zeros(outputs, dtype) if "bias" in how else None,
        gate="silu" if "swiglu" in how else "gelu_approx" if "geglu" in how else None,
    )


def experts(
    rows: int,
    top_k: int,
    count: int,
    hidden: int,
    inner: int,
    dtype: mx.Dtype,
    quantisation: Quantisation | None = None,
    oai: bool = False,
    gated: bool = True,
) -> None:
    def part(outputs: int, depth: int) -> ExpertWeight:
        bias = mx.zeros((count, outputs), dtype) if oai else None
        if quantisation is None:
            return ExpertWeight(mx.zeros((count, outputs, depth), dtype), bias)
        bits, size, mode = quantisation
        affine = mode == "affine"
        words = mx.zeros((count, outputs, depth * bits // 32), mx.uint32)
        scales = mx.zeros((count, outputs, depth // size), dtype if affine else mx.uint8)
        weight = QuantisedWeight(words, scales, scales if affine else None, quantisation)
        return ExpertWeight(weight, bias)

    plain = Activation("swiglu" if gated else "relu2")
    activation = Activation("clamped_swiglu", 1.702, 7.0) if oai else plain
    indices = mx.zeros((rows, top_k), mx.uint32)
    up = part(inner, hidden) if gated else None
    made = Experts(part(inner, hidden), up, part(hidden, inner), activation)
    y = expert_mlp(mx.zeros((rows, hidden), dtype), indices, made)
    expert_sum(y, mx.zeros((rows, top_k), dtype), dtype)


def router(rows: int, top_k: int, count: int, routing: Routing, dtype: mx.Dtype) -> None:
    bias = mx.zeros(count) if routing.scoring == "sigmoid" else None
    of_float32 = mx.float32 if bias is not None else None
    expert_topk(mx.zeros((rows, count), dtype), top_k, routing, dtype=of_float32, bias=bias)


def merge(of: Heads, dtype: mx.Dtype) -> None:
    merge_partitions(mx.zeros((ROWS, of.heads, 4, of.dim)), mx.zeros((ROWS, of.heads, 4)), dtype)


def _columns(heads: int, dim: int, dtype: mx.Dtype) -> Columns:
    return Columns(mx.zeros((ROWS, heads * dim), dtype), 0)


def recurrence(
    k_heads: int, heads: int, k_dim: int, dim: int, form: str, dtype: mx.Dtype, max_seqlen: int
) -> None:
    of_k, logits = _columns(k_heads, k_dim, dtype), _columns(heads, 1, dtype)
    of_rows, of_heads = mx.zeros((ROWS, heads)), mx.zeros(heads)
    bias = of_heads.astype(dtype)
    gates = {
        "delta": lambda: given(of_rows, of_rows.astype(dtype)),
        "vector": lambda: given(mx.zeros((ROWS, heads, k_dim)), of_rows.astype(dtype)),
        "ssm": lambda: given(of_rows, of_rows),
        "fused delta": lambda: delta_gates(logits, logits, of_heads, bias),
        "fused ssm": lambda: time_gates(logits, of_heads, bias, (0.0, 1.0)),
    }
    arrays = mx.zeros((STATE_SLOTS, heads, dim, k_dim)), _ints(ROWS + 1, 4), new_ticket()
    how = {"num_k_heads": k_heads, "max_seqlen": max_seqlen}
    how |= {"norm": QKNorm(k_dim**-0.5, 1e-6) if form == "fused delta" else None}
    how |= {"skip": {"ssm": of_heads, "fused ssm": bias}.get(form)}
    gated_delta(of_k, of_k, _columns(heads, dim, dtype), gates[form](), *arrays, **how)


def norm(dim: int, groups: int, gate_first: bool, dtype: mx.Dtype) -> None:
    x, z = mx.zeros((ROWS, groups, dim), dtype), _columns(groups, dim, dtype)
    weight = mx.zeros(dim * groups if gate_first else dim, dtype)
    gated_rms_norm(x, z, weight, 1e-6, dim=dim, gate_first=gate_first)


def conv(channels: int, size: int, bias: bool, silu: bool, dtype: mx.Dtype) -> None:
    weight, biases = mx.zeros((channels, size, 1), dtype), mx.zeros(channels, dtype)
    states = mx.zeros((STATE_SLOTS, size - 1, channels), dtype)
    arrays = states, _ints(ROWS + 1, 4), _ints(ROWS + 2, 2), new_ticket()
    x = _columns(channels, 1, dtype)
    causal_conv(x, weight, biases if bias else None, *arrays, silu=silu)
