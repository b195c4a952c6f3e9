"""A small launch of every kernel, which uses all of its parts."""

import numpy as np
import pytest

from tests.support.device import change_device
from tests.support.expert_cases import draw_experts, plan_of
from tests.support.recurrent_cases import RAGGED, Segments, given
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import cache_ops, decode, experts, latent_attention
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.arguments import RMSNorm, new_ticket
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.decode import DecodePlan
from vllm_metal_lite.kernels.expert_topk import Routing
from vllm_metal_lite.kernels.expert_topk import expert_topk as expert_topk_of
from vllm_metal_lite.kernels.experts import Activation, ExpertWeight
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.latent_write import NewLatents, latent_write
from vllm_metal_lite.kernels.new_rows import Columns, NewRows, Rope
from vllm_metal_lite.kernels.prefill import plan_tiles, varlen_prefill
from vllm_metal_lite.kernels.recurrence import QKNorm, delta_gates, time_gates
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.kernels.shared_prefix import SharedPrefixResult, shared_prefix
from vllm_metal_lite.kernels.skinny_gemm import GemmPlan, skinny_gemm
from vllm_metal_lite.kernels.weights import quantised as quantised_weight
from vllm_metal_lite.kernels.weights import shape_of, spread_of
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.specs import Quantisation

STORE = ("keys", "values", "states")
FACTOR = 1.3466  # of a rotation
KV_HEADS, GROUP, DIM, BLOCK_SIZE, SLOTS = 2, 9, 72, 8, 96


def draw(*shape, seed, dtype=mx.float32):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return mx.array(values).astype(dtype)


def store(dtype, dim=DIM):
    return [draw(SLOTS, KV_HEADS, dim, seed=seed, dtype=dtype) for seed in (1, 2)]


def quantised(dtype, bits=4, dim=DIM):
    """A store of 4 bits a value, and its spec: rows of three groups of 24."""
    spec = LayerSpec(KV_HEADS, dim, dim, dtype, bits=bits)
    return [spec.k_row.pack(rows) for rows in store(dtype, dim)], spec


def kv_write(dtype, written=None, spec=None):
    rows = [draw(5, KV_HEADS, DIM, seed=seed, dtype=dtype) for seed in (3, 4)]
    written = written or store(dtype)
    # The slots 94 and 95 are the last two: what goes beyond a row goes beyond the store.
    slots = mx.array([7, 94, -1, 95, 40], mx.int32)
    return [*written, cache_ops.kv_write(*rows, slots, *written, new_ticket(), spec)]


def wide_kv_write(dtype):
    """Rows of 13 groups of 40, more than 32 lanes take at once; not a head for each simdgroup."""
    spec = LayerSpec(5, 520, 520, dtype, bits=8)
    written = [spec.k_row.pack(draw(8, 5, 520, seed=seed, dtype=dtype)) for seed in (1, 2)]
    rows = [draw(3, 5, 520, seed=seed, dtype=dtype) for seed in (3, 4)]
    slots = mx.array([7, -1, 2], mx.int32)
    return [*written, cache_ops.kv_write(*rows, slots, *written, new_ticket(), spec)]


def kv_gather(dtype, kept=None, spec=None):
    slots = mx.array([95, 3, 4, 0, 94, 95], mx.int32)
    return list(cache_ops.kv_gather(slots, *(kept or store(dtype)), new_ticket(), spec))


def paged_decode(dtype, kept=None, spec=None, prefix=None, plan=(1, 2)):
    """Sequences of 21, 0 and 9 keys, the first two blocks of the first at the end of the store."""
    tables = mx.array([[11, 10, 2], [0, 0, 0], [4, 5, 0]], mx.int32)
    q = draw(3, KV_HEADS * GROUP, DIM, seed=5, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        change_device(patch, decode_sums=64)  # in float32 two tiles, the second a head short
        arrays = q, tables, mx.array([21, 0, 9], mx.int32), *(kept or store(dtype)), new_ticket()
        how = {"block_size": BLOCK_SIZE, "scale": 0.2, "spec": spec}
        out, _ = decode.paged_decode(*arrays, plan=DecodePlan(*plan), prefix=prefix, **how)
    return [out]


def fused_decode(dtype, written=None, spec=None, factor=1.0):
    """As above, in two splits; the newest rows are not in the store yet.  Several tiles a head."""
    tables = mx.array([[11, 10, 2], [0, 0, 0], [4, 5, 0]], mx.int32)
    heads = KV_HEADS * GROUP
    rows = draw(3, (heads + 2 * KV_HEADS) * DIM, seed=13, dtype=dtype)
    columns = [Columns(rows, n * DIM) for n in (0, heads, heads + KV_HEADS)]
    norm, written = RMSNorm(draw(DIM, seed=10, dtype=dtype), 1e-5), written or store(dtype)
    new = NewRows(*columns, heads, Rope(40, False, 1e4, 1.0, None, factor), norm, norm)
    arrays = new, tables, mx.array([21, 0, 9], mx.int32), *written, new_ticket()
    how = {"block_size": BLOCK_SIZE, "scale": 0.2, "spec": spec}
    out, _ = decode.paged_decode(*arrays, plan=DecodePlan(2, 2), **how)
    return [*written, out]


def shared_prefix_rows(dtype, q=None, dim=DIM, kept=None, spec=None):
    """The second row's first 45 keys in two splits, the last one short, as is the tile of 27
    pairs."""
    blocks = [10, 2, 11, 5, 3, 0]
    tables = mx.array([[4] * 6, blocks, blocks], mx.int32)
    lens = [mx.array(n, mx.int32) for n in ([8, 46, 48], [1], [0, 45, 45])]
    q = draw(3, KV_HEADS * GROUP, dim, seed=5, dtype=dtype) if q is None else q
    arrays = q, tables, *lens, *(kept or store(dtype, dim)), new_ticket()
    how = {"block_size": BLOCK_SIZE, "scale": 0.2, "spec": spec}
    partial, lse, _ = shared_prefix(*arrays, splits=2, **how)
    return [partial, lse]


def shared_prefix_of_new_rows(dtype, factor=1.0):
    """The same, of queries that are still to be normalised and turned, and so large that a
    simdgroup does it in turns."""
    heads, dim = KV_HEADS * GROUP, 136
    rows = draw(3, (heads + 2 * KV_HEADS) * dim, seed=13, dtype=dtype)
    columns = [Columns(rows, n * dim) for n in (0, heads, heads + KV_HEADS)]
    norm = RMSNorm(draw(dim, seed=10, dtype=dtype), 1e-5)
    rope = Rope(40, False, 1e4, 1.0, None, factor)
    return shared_prefix_rows(dtype, NewRows(*columns, heads, rope, norm, norm), dim)


def shared_prefix_of_quantised_rows(dtype):
    """8 bits a value, an even number of words a row."""
    kept, spec = quantised(dtype, 8, 128)
    return shared_prefix_rows(dtype, dim=128, kept=kept, spec=spec)


def decode_behind_a_prefix(dtype):
    """The sequences of `paged_decode`; the first shares its 8 first keys."""
    parts = (draw(3, KV_HEADS * GROUP, *dims, seed=13) for dims in ((3, DIM), (3,)))
    return paged_decode(dtype, prefix=SharedPrefixResult(*parts, mx.array([8, 0, 0], mx.int32)))


def decode_in_splits_behind_a_prefix(dtype):
    """The same in two splits, the prefix in more than both look at side by side."""
    parts = (draw(3, KV_HEADS * GROUP, *dims, seed=13) for dims in ((40, DIM), (40,)))
    prefix = SharedPrefixResult(*parts, mx.array([8, 0, 0], mx.int32))
    return paged_decode(dtype, prefix=prefix, plan=(2, 2))


def merge_partitions(dtype):
    """Two rows of 40 splits."""
    return [decode.merge_partitions(draw(1, 2, 40, DIM, seed=7), draw(1, 2, 40, seed=8), dtype)]


def varlen_prefill_rows(dtype, kept=None, spec=None):
    """Whole prompts of 1 and 22 rows and a chunk of 5 behind 40 keys, then two rows of padding."""
    tables = mx.array([[11, 0, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 2]], mx.int32)
    cu_seqlens_q = np.array([0, 1, 23, 28], np.int32)
    tiles = mx.array(plan_tiles(cu_seqlens_q, 30, GROUP))
    q = draw(30, KV_HEADS * GROUP, DIM, seed=6, dtype=dtype)
    where = tables, mx.array(cu_seqlens_q), mx.array([1, 22, 45], mx.int32), tiles
    how = {"block_size": BLOCK_SIZE, "scale": 0.2, "spec": spec}
    out, _ = varlen_prefill(q, *where, *(kept or store(dtype)), new_ticket(), **how)
    return [out]


def latent_rows(dtype, splits=1, dims=(64, 16), bits=None):
    """Whole prompts of 1 and 5 rows and a chunk of 4 behind 41 keys, which end with the store, then
    two rows of padding."""
    tables = mx.array([[10, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0], [6, 7, 8, 9, 2, 11]], mx.int32)
    cu_seqlens_q = np.array([0, 1, 6, 10], np.int32)
    spec = LayerSpec(1, *dims, dtype, bits=bits)
    rows = zip((spec.k_row, spec.v_row), (1, 2), strict=True)
    kept = [row.pack(draw(SLOTS, 1, row.dim, seed=seed, dtype=dtype)) for row, seed in rows]
    q, q_pe = (
        draw(12, GROUP, dim, seed=seed, dtype=dtype) for dim, seed in zip(dims, (6, 7), strict=True)
    )
    tiles = mx.array(plan_tiles(cu_seqlens_q, 12, GROUP))
    where = tables, mx.array(cu_seqlens_q), mx.array([1, 5, 48], mx.int32), tiles
    how = {"block_size": BLOCK_SIZE, "scale": 0.2, "splits": splits, "spec": spec}
    out, lse = latent_attention.latent_attention(q, q_pe, *where, *kept, new_ticket(), **how)
    return [out, lse]


def new_latents(dtype, bits=None, factor=1.0):
    """Rows of two products, the last slot of the store among the written, and one without."""
    heads, latent_dim, rope = GROUP, 128, 24
    q = draw(5, heads * 40, seed=9, dtype=dtype)
    kv = draw(5, latent_dim + rope, seed=13, dtype=dtype)
    spec = LayerSpec(1, latent_dim, rope, dtype, bits=bits)
    rows = zip((spec.k_row, spec.v_row), (1, 2), strict=True)
    written = [row.pack(draw(SLOTS, 1, row.dim, seed=seed, dtype=dtype)) for row, seed in rows]
    norm = RMSNorm(draw(latent_dim, seed=10, dtype=dtype), 1e-5)
    columns = Columns(q, 16), 40, heads, Columns(kv, 0), Columns(kv, latent_dim)
    q_pe, _ = latent_write(
        NewLatents(*columns, norm, Rope(20, True, 1e4, 1.0, None, factor)),
        positions=mx.array([0, 3, 4, 9, 50], mx.int32),
        slot_mapping=mx.array([7, 94, -1, 95, 40], mx.int32),
        keys=written[0],
        values=written[1],
        ticket=new_ticket(),
        spec=spec,
    )
    mx.eval(q_pe)  # MLX does not know that the store is written
    return [*written, q_pe]


def rope_write_rows(dtype, written=None, spec=None, factor=1.0):
    """Rows joined, not a head for every simdgroup, the last slot of the store among the written."""
    rows = draw(5, (6 + 2 * KV_HEADS) * DIM, seed=9, dtype=dtype)
    written = written or store(dtype)
    norm = RMSNorm(draw(DIM, seed=10, dtype=dtype), 1e-5)
    columns = [Columns(rows, heads * DIM) for heads in (0, 6, 6 + KV_HEADS)]
    q, _ = rope_write(
        NewRows(*columns, 6, Rope(40, False, 1e4, 1.0, None, factor), norm, norm),
        positions=mx.array([0, 3, 4, 9, 50], mx.int32),
        slot_mapping=mx.array([7, 94, -1, 95, 40], mx.int32),
        keys=written[0],
        values=written[1],
        ticket=new_ticket(),
        spec=spec,
    )
    return [*written, q]


def rope_write_in_turns(dtype):
    """Of as many rows as a long prompt has: a simdgroup takes several heads, one after another."""
    with pytest.MonkeyPatch.context() as patch:
        change_device(patch, rope_many_rows=4)
        return rope_write_rows(dtype, *quantised(dtype))


def add_rms_norm_rows(dtype, post_norm=False):
    """Rows of more than one simdgroup, the last has idle threads."""
    x, y = (draw(3, 200, seed=seed, dtype=dtype) for seed in (11, 30))
    weight = draw(200, seed=11, dtype=dtype)
    norm = RMSNorm(weight, 1e-3) if post_norm else None
    return list(add_rms_norm(x, y, weight, 1e-5, norm))


def gathered_rows(dtype):
    return [gather_rows(draw(7, 40, seed=12, dtype=dtype), mx.array([[6, 0], [6, 3]], mx.int32))]


def skinny_gemm_rows(dtype):
    """Of 16 bits.  Sums of some rows and then of others, the last tiles of both sides not full, and
    simdgroups with unlike numbers of chunks."""
    dtype = mx.bfloat16 if dtype == mx.float32 else dtype
    x, weight = (draw(rows, 928, seed=14, dtype=dtype) for rows in (53, 40))
    return [skinny_gemm(x, weight, plan=GemmPlan(8, 2)).astype(mx.float32)]


def skinny_gemm_with_all(dtype):
    """A norm before the product, SwiGLU and a residual sum after it: of few rows, and of rows
    whose sums are held in turns.  Rows are of unlike size."""
    dtype = mx.bfloat16 if dtype == mx.float32 else dtype
    weight, gain = draw(42, 928, seed=14, dtype=dtype) / 30, draw(928, seed=15, dtype=dtype)
    results = []
    for rows in (11, 53):
        sizes = mx.arange(1, rows + 1)[:, None].astype(dtype)
        x, residual = draw(rows, 928, seed=16, dtype=dtype) * sizes, draw(rows, 21, seed=17)
        how = {"norm": RMSNorm(gain, 1e-5), "residual": residual.astype(dtype), "gate": "silu"}
        product = skinny_gemm(x, weight, plan=GemmPlan(8, 2), **how)
        results.append(product.astype(mx.float32))
    return results


def skinny_gemm_of_words(dtype, how, depth, columns=16):
    """Weights of unlike size in each group, with all; loads at once, alone and of fewer chunks."""
    dtype = mx.bfloat16 if dtype == mx.float32 else dtype
    sizes = mx.repeat(mx.arange(1, depth // how.group_size + 1), how.group_size) / 8
    weight = quantised_weight((draw(42, depth, seed=14) * sizes / depth**0.5).astype(dtype), how)
    x, gain, bias, residual = (
        draw(*shape, seed=seed).astype(dtype)
        for seed, shape in enumerate([(11, depth), (depth,), (42,), (11, 21)], 15)
    )
    plan = GemmPlan(2, 2, spread_of(shape_of(weight)), columns)
    how = {"norm": RMSNorm(gain, 1e-5), "bias": bias, "residual": residual}
    product = skinny_gemm(x, weight, gate="gelu_approx", plan=plan, **how)
    return [product.astype(mx.float32)]


def skinny_gemm_in_lanes(dtype):
    """Three rows of unlike size, with all and with nothing but the product."""
    dtype = mx.bfloat16 if dtype == mx.float32 else dtype
    how = Quantisation(4, 32)
    weight = quantised_weight((draw(42, 928, seed=14) / 30).astype(dtype), how)
    x = (draw(3, 928, seed=15) * mx.array([[1.0], [2], [5]])).astype(dtype)
    gain, bias, residual = (
        draw(*shape, seed=seed).astype(dtype)
        for seed, shape in enumerate([(928,), (42,), (3, 21)], 16)
    )
    plan = GemmPlan(2, 2, 4, 16, in_lanes=True)
    everything = skinny_gemm(
        x, weight, norm=RMSNorm(gain, 1e-5), bias=bias, residual=residual, gate="silu", plan=plan
    )
    return [y.astype(mx.float32) for y in (everything, skinny_gemm(x, weight, plan=plan))]


GPT_OSS = Activation("clamped_swiglu", 1.702, 7.0)
# Of 3 experts: one of more pairs than a tile, one of padding's only.
CHOSEN = np.array([[0, 2]] * 3 + [[2, 0]] * 2 + [[2, 2]] * 6 + [[1, 0]] * 5)
LIVE = 11


def expert_topk(dtype, routing, *, bias=None, shift=0.0):
    """Rows that fill a threadgroup and more, experts that fill a slot and more, equal scores."""
    logits = (mx.round(draw(6, 40, seed=24) * 4) / 4 + shift).astype(dtype)
    of_float32 = {"dtype": mx.float32, "bias": bias} if bias is not None else {}
    indices, weights = expert_topk_of(logits, 5, routing, **of_float32)
    return [indices, weights.astype(mx.float32)]


def expert_topk_of_negatives(dtype):
    """And of both zeros, which are equal."""
    routing, zeros = Routing("logits", True, "softmax"), mx.where(draw(6, 40, seed=25) < 0, -0.0, 0)
    of_zeros = expert_topk_of(zeros.astype(dtype), 5, routing)[0]
    return [*expert_topk(dtype, routing, shift=-8.0), of_zeros]


def expert_topk_of_large(dtype):
    return expert_topk(dtype, Routing("softmax", True, "renormalized"), shift=300.0)


def expert_topk_with_a_bias(dtype):
    """NaN chooses, too."""
    bias = np.where(np.arange(40) % 9 == 3, 0.4, np.where(np.arange(40) == 7, np.nan, 0))
    routing = Routing("sigmoid", False, "renormalized", 0.5, 2.5)
    return expert_topk(dtype, routing, bias=mx.array(bias.astype(np.float32)))


def expert_plan(dtype):
    """Of more pairs than threadgroup memory holds at once."""
    chosen = np.tile(CHOSEN, (35, 1))
    plan = experts.plan_experts(mx.array(chosen), 3, mx.array([len(chosen) - 5], mx.int32))
    return [plan.array]


def expert_gemm(dtype, how=None, activation=GPT_OSS):
    """gpt-oss's gate and up with biases, rows of unlike size; loads at once, alone and of fewer
    chunks.  Columns do not fill a threadgroup."""
    dtype = mx.bfloat16 if dtype == mx.float32 else dtype
    made = draw_experts(3, 928, 36, dtype, how, activation, bias=True)
    sizes = mx.arange(1, len(CHOSEN) + 1)[:, None]
    x = (draw(len(CHOSEN), 928, seed=19) * sizes / 4).astype(dtype)
    plan = GemmPlan(2, 2, 1 if how is None else spread_of(shape_of(made.gate.weight)))
    pairs, tiles = mx.array(CHOSEN.reshape(-1)), plan_of(CHOSEN, 3, 16, LIVE)
    gated = {"up": made.up, "activation": made.activation}
    product = experts.expert_product(x, pairs, tiles, made.gate, share=2, plan=plan, **gated)
    return [product.astype(mx.float32)]


def expert_gemm_in_lanes(dtype):
    """Four rows of unlike size; experts have three, one and none."""
    dtype = mx.bfloat16 if dtype == mx.float32 else dtype
    chosen, how = np.array([[2], [0], [2], [2]]), Quantisation(4, 32)
    made = draw_experts(3, 928, 36, dtype, how, GPT_OSS, bias=True)
    x = (draw(4, 928, seed=19) * mx.array([[0.5], [1], [2], [3]])).astype(dtype)
    pairs, plan = mx.array(chosen.reshape(-1)), GemmPlan(2, 2, 4, 16, in_lanes=True)
    gated = {"up": made.up, "activation": made.activation}
    tiles = plan_of(chosen, 3, 4)
    product = experts.expert_product(x, pairs, tiles, made.gate, plan=plan, **gated)
    return [product.astype(mx.float32)]


def expert_gemm_down(dtype):
    """Without a gate: 16 columns of one weight."""
    dtype = mx.bfloat16 if dtype == mx.float32 else dtype
    x = draw(CHOSEN.size, 96, seed=20).astype(dtype)
    weight = ExpertWeight(draw(3, 40, 96, seed=21).astype(dtype))
    product = experts.expert_product(
        x, mx.array(CHOSEN.reshape(-1)), plan_of(CHOSEN, 3, 16, LIVE), weight
    )
    return [product.astype(mx.float32)]


def expert_sum(dtype):
    weights = draw(5, 3, seed=23, dtype=dtype)
    return [experts.expert_sum(draw(15, 260, seed=22, dtype=dtype), weights)]


def causal_conv_rows(dtype):
    """Segments of every kind, channels for two threadgroups; NaN in slots where none starts."""
    step = Segments(**RAGGED)
    x, weight, bias = (
        draw(*shape, seed=18, dtype=dtype) for shape in ((step.num_rows, 300), (300, 4), (300,))
    )
    states = mx.array(step.states(3, 300)).astype(dtype)
    where = mx.array(step.array), mx.array(plan_conv_tiles(step.array))
    y, _ = causal_conv(Columns(x, 0), weight, bias, states, *where, new_ticket(), silu=True)
    mx.eval(y)  # MLX does not know that the state store is written
    return [mx.nan_to_num(states), y]


def recurrent_rows(dtype, form):
    """Two heads of k, more rows of a state than a threadgroup has; gates of some form.  No row is
    padding in one form: a read past the last row leaves the array."""
    step, k_dim = Segments(**RAGGED | {"padding": 0 if form == "ssm of logits" else 3}), 48
    rows = step.num_rows
    joined = draw(rows, 4 * k_dim + 4 * 72, seed=18, dtype=dtype) / k_dim**0.5
    wide = [Columns(joined, start) for start in (0, 2 * k_dim, 4 * k_dim)]
    states, beta = mx.array(step.states(4, 72, k_dim)), mx.sigmoid(draw(rows, 4, seed=19))
    norm, skip = None, draw(4, seed=22) if "ssm" in form else None
    if form == "columns":
        gates = given(mx.sigmoid(draw(rows, 4, k_dim, seed=20)), beta)
    elif form == "ssm":
        gates = given(mx.exp(beta * -mx.exp(draw(4, seed=21))), beta)
    elif form == "logits":
        a, b = (Columns(draw(rows, 12, seed=n, dtype=dtype), 4) for n in (23, 24))
        gates = delta_gates(a, b, draw(4, seed=25), draw(4, seed=26, dtype=dtype), beta_scale=2)
        norm = QKNorm(0.3, 1e-3)
    else:
        time = Columns(draw(rows, 12, seed=23), 4)
        gates = time_gates(time, draw(4, seed=25), mx.ones(4), (0.5, 2.0))
    how = {"max_seqlen": step.max_seqlen, "norm": norm, "skip": skip}
    y, _ = gated_delta(
        *wide, gates, states, mx.array(step.array), new_ticket(), num_k_heads=2, **how
    )
    mx.eval(y)  # MLX does not know that the state store is written
    return [mx.nan_to_num(states), y]


def gated_norm_rows(dtype, groups=5, dim=72):
    """More groups than a threadgroup has, and columns past the end of the gate."""
    x, z = (draw(3, groups * dim, seed=n, dtype=dtype) for n in (27, 28))
    weight = draw(groups * dim, seed=29, dtype=dtype)
    return [gated_rms_norm(x, Columns(z, 0), weight, 1e-5, dim=dim)]


RUN = {
    "expert_topk": lambda dtype: expert_topk(dtype, Routing("softmax", True, "renormalized")),
    "expert_topk/bias": expert_topk_with_a_bias,
    "expert_topk/logits": expert_topk_of_negatives,
    "expert_topk/large": expert_topk_of_large,
    "expert_plan": expert_plan,
    "expert_gemm": expert_gemm,
    "expert_gemm/mxfp4": lambda dtype: expert_gemm(dtype, Quantisation(4, 32, "mxfp4")),
    "expert_gemm/gelu": lambda dtype: expert_gemm(dtype, None, Activation("geglu")),
    "expert_gemm/relu2": lambda dtype: expert_gemm(dtype, None, Activation("relu2")),
    "expert_gemm/down": expert_gemm_down,
    "expert_gemm/lanes": expert_gemm_in_lanes,
    "expert_sum": expert_sum,
    "causal_conv": causal_conv_rows,
    "gated_delta": lambda dtype: recurrent_rows(dtype, "columns"),
    "gated_delta/ssm": lambda dtype: recurrent_rows(dtype, "ssm"),
    "gated_delta/fused": lambda dtype: recurrent_rows(dtype, "logits"),
    "gated_delta/fused_ssm": lambda dtype: recurrent_rows(dtype, "ssm of logits"),
    "gated_rms_norm": gated_norm_rows,
    "gated_rms_norm/long": lambda dtype: gated_norm_rows(dtype, 1, 900),
    "gather_rows": gathered_rows,
    "kv_write": kv_write,
    "kv_gather": kv_gather,
    "paged_decode": paged_decode,
    "merge_partitions": merge_partitions,
    "varlen_prefill": varlen_prefill_rows,
    "latent_attention": latent_rows,
    "latent_write": new_latents,
    "latent_write/quantised": lambda dtype: new_latents(dtype, 4),
    "latent_write/scaled": lambda dtype: new_latents(dtype, factor=FACTOR),
    "latent_attention/splits": lambda dtype: latent_rows(dtype, 3),
    "latent_attention/quantised": lambda dtype: latent_rows(dtype, dims=(128, 24), bits=4),
    "varlen_prefill/quantised": lambda dtype: varlen_prefill_rows(dtype, *quantised(dtype)),
    "kv_write_quantised": lambda dtype: kv_write(dtype, *quantised(dtype)),
    "kv_write_quantised/wide": wide_kv_write,
    "kv_gather_quantised": lambda dtype: kv_gather(dtype, *quantised(dtype)),
    "paged_decode/quantised": lambda dtype: paged_decode(dtype, *quantised(dtype)),
    "paged_decode/fused": fused_decode,
    "paged_decode/scaled": lambda dtype: fused_decode(dtype, factor=FACTOR),
    "paged_decode/fused_quantised": lambda dtype: fused_decode(dtype, *quantised(dtype)),
    "rope_write/quantised_in_turns": rope_write_in_turns,
    "rope_write/quantised": lambda dtype: rope_write_rows(dtype, *quantised(dtype)),
    "shared_prefix": shared_prefix_rows,
    "shared_prefix/fused": shared_prefix_of_new_rows,
    "shared_prefix/scaled": lambda dtype: shared_prefix_of_new_rows(dtype, FACTOR),
    "shared_prefix/quantised": shared_prefix_of_quantised_rows,
    "paged_decode/prefix": decode_behind_a_prefix,
    "paged_decode/prefix_splits": decode_in_splits_behind_a_prefix,
    "rope_write": rope_write_rows,
    "rope_write/scaled": lambda dtype: rope_write_rows(dtype, factor=FACTOR),
    "add_rms_norm": add_rms_norm_rows,
    "add_rms_norm/post": lambda dtype: add_rms_norm_rows(dtype, post_norm=True),
    "skinny_gemm": skinny_gemm_rows,
    "skinny_gemm/all": skinny_gemm_with_all,
    "skinny_gemm/affine": lambda dtype: skinny_gemm_of_words(dtype, Quantisation(4, 32), 928, 32),
    "skinny_gemm/lanes": skinny_gemm_in_lanes,
    "skinny_gemm/6": lambda dtype: skinny_gemm_of_words(dtype, Quantisation(6, 64), 960),
    "skinny_gemm/mxfp8": lambda dtype: skinny_gemm_of_words(
        dtype, Quantisation(8, 32, "mxfp8"), 928
    ),
    "skinny_gemm/nvfp4": lambda dtype: skinny_gemm_of_words(
        dtype, Quantisation(4, 16, "nvfp4"), 928
    ),
}
