"""A small launch of every kernel, which uses all of its parts."""

from functools import partial, wraps

import numpy as np
import pytest

from tests.support.kernels.arrays import normal
from tests.support.kernels.device import change_device
from tests.support.kernels.expert_cases import draw_experts, plan_of
from tests.support.kernels.recurrent_cases import RAGGED, Segments, given
from vllm_metal_lite.attention.paged.varlen_prompts import plan_tiles
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
from vllm_metal_lite.kernels.prefill import varlen_prefill
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
KV_HEADS, HEADS, GROUP, DIM, BLOCK_SIZE, SLOTS = 2, 18, 9, 72, 8, 96
HOW = {"block_size": BLOCK_SIZE, "scale": 0.2}
# Rows to be written.  The slots 94 and 95 are the last two: what goes beyond a row goes beyond the
# store.
NEW_SLOTS, POSITIONS = (mx.array(n, mx.int32) for n in ([7, 94, -1, 95, 40], [0, 3, 4, 9, 50]))


def draw(*shape, seed, dtype=mx.float32):
    return normal(np.random.default_rng(seed), *shape, dtype=dtype)


def spec_of(dtype, bits=None, dim=DIM):
    """In 4 bits, rows have three groups of 24."""
    return LayerSpec(KV_HEADS, dim, dim, dtype, bits=bits)


def store(spec, slots=SLOTS):
    rows = zip((spec.k_row, spec.v_row), (1, 2), strict=True)
    shape = slots, spec.num_kv_heads
    return [row.pack(draw(*shape, row.dim, seed=seed, dtype=spec.dtype)) for row, seed in rows]


def new_rows(count, heads, dtype, dim=DIM, seed=13, factor=1.0):
    """q, k and v side by side, still to be normalised and rotated."""
    rows = draw(count, (heads + 2 * KV_HEADS) * dim, seed=seed, dtype=dtype)
    columns = [Columns(rows, n * dim) for n in (0, heads, heads + KV_HEADS)]
    norm = RMSNorm(draw(dim, seed=10, dtype=dtype), 1e-5)
    return NewRows(*columns, heads, Rope(40, False, 1e4, 1.0, None, factor), norm, norm)


def kv_write(dtype, bits=None):
    spec = spec_of(dtype, bits)
    rows, written = [draw(5, KV_HEADS, DIM, seed=n, dtype=dtype) for n in (3, 4)], store(spec)
    return [*written, cache_ops.kv_write(*rows, NEW_SLOTS, *written, new_ticket(), spec)]


def wide_kv_write(dtype):
    """Rows of 13 groups of 40, more than 32 lanes take at once; not a head for each simdgroup."""
    spec = LayerSpec(5, 520, 520, dtype, bits=8)
    rows, written = [draw(3, 5, 520, seed=n, dtype=dtype) for n in (3, 4)], store(spec, 8)
    slots = mx.array([7, -1, 2], mx.int32)
    return [*written, cache_ops.kv_write(*rows, slots, *written, new_ticket(), spec)]


def kv_gather(dtype, bits=None):
    slots, spec = mx.array([95, 3, 4, 0, 94, 95], mx.int32), spec_of(dtype, bits)
    return list(cache_ops.kv_gather(slots, *store(spec), new_ticket(), spec))


def decoded(q, kept, spec, plan, prefix=None):
    """Sequences of 21, 0 and 9 keys, the first two blocks of the first at the end of the store."""
    tables = mx.array([[11, 10, 2], [0, 0, 0], [4, 5, 0]], mx.int32)
    arrays = q, tables, mx.array([21, 0, 9], mx.int32), *kept, new_ticket()
    how = {"plan": DecodePlan(*plan), "prefix": prefix, "spec": spec}
    return decode.paged_decode(*arrays, **how, **HOW)[0]


def paged_decode(dtype, bits=None, plan=(1, 2), prefix=None):
    spec, q = spec_of(dtype, bits), draw(3, HEADS, DIM, seed=5, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        change_device(patch, decode_sums=64)  # in float32 two tiles, the second a head short
        return [decoded(q, store(spec), spec, plan, prefix)]


def fused_decode(dtype, bits=None, factor=1.0):
    """In two splits; the newest rows are not in the store yet.  Several tiles a head."""
    spec = spec_of(dtype, bits)
    written, rows = store(spec), new_rows(3, HEADS, dtype, factor=factor)
    return [*written, decoded(rows, written, spec, (2, 2))]


def shared_prefix_rows(dtype, q=None, dim=DIM, bits=None):
    """The second row's first 45 keys in two splits, the last one short, as is the tile of 27
    pairs."""
    blocks, spec = [10, 2, 11, 5, 3, 0], spec_of(dtype, bits, dim)
    tables = mx.array([[4] * 6, blocks, blocks], mx.int32)
    lens = [mx.array(n, mx.int32) for n in ([8, 46, 48], [1], [0, 45, 45])]
    q = draw(3, HEADS, dim, seed=5, dtype=dtype) if q is None else q
    arrays = q, tables, *lens, *store(spec), new_ticket()
    return list(shared_prefix(*arrays, splits=2, spec=spec, **HOW)[:2])


def shared_prefix_of_new_rows(dtype, factor=1.0):
    """The same, of queries that are still to be normalised and turned, and so large that a
    simdgroup does it in turns."""
    return shared_prefix_rows(dtype, new_rows(3, HEADS, dtype, 136, factor=factor), 136)


def decode_behind_a_prefix(dtype, splits=3, plan=(1, 2)):
    """The sequences of `decoded`; the first shares its 8 first keys."""
    parts = (draw(3, HEADS, *dims, seed=13) for dims in ((splits, DIM), (splits,)))
    prefix = SharedPrefixResult(*parts, mx.array([8, 0, 0], mx.int32))
    return paged_decode(dtype, plan=plan, prefix=prefix)


def merge_partitions(dtype):
    """Two rows of 40 splits."""
    return [decode.merge_partitions(draw(1, 2, 40, DIM, seed=7), draw(1, 2, 40, seed=8), dtype)]


def varlen_prefill_rows(dtype, bits=None):
    """Whole prompts of 1 and 22 rows and a chunk of 5 behind 40 keys, then two rows of padding."""
    tables = mx.array([[11, 0, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 2]], mx.int32)
    cu_seqlens_q, spec = np.array([0, 1, 23, 28], np.int32), spec_of(dtype, bits)
    tiles = mx.array(plan_tiles(cu_seqlens_q, 30, GROUP))
    q = draw(30, HEADS, DIM, seed=6, dtype=dtype)
    where = tables, mx.array(cu_seqlens_q), mx.array([1, 22, 45], mx.int32), tiles
    return [varlen_prefill(q, *where, *store(spec), new_ticket(), spec=spec, **HOW)[0]]


def latent_rows(dtype, splits=1, dims=(64, 16), bits=None):
    """Whole prompts of 1 and 5 rows and a chunk of 4 behind 41 keys, which end with the store, then
    two rows of padding."""
    tables = mx.array([[10, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0], [6, 7, 8, 9, 2, 11]], mx.int32)
    cu_seqlens_q, spec = np.array([0, 1, 6, 10], np.int32), LayerSpec(1, *dims, dtype, bits=bits)
    queries = [draw(12, GROUP, d, seed=n, dtype=dtype) for n, d in enumerate(dims, 6)]
    tiles = mx.array(plan_tiles(cu_seqlens_q, 12, GROUP))
    where = tables, mx.array(cu_seqlens_q), mx.array([1, 5, 48], mx.int32), tiles
    arrays = *queries, *where, *store(spec), new_ticket()
    return list(latent_attention.latent_attention(*arrays, splits=splits, spec=spec, **HOW))


def written_by(write, new, spec):
    """The store and the queries behind `rope_write` or `latent_write`."""
    written = store(spec)
    how = {"positions": POSITIONS, "slot_mapping": NEW_SLOTS, "ticket": new_ticket()}
    q, _ = write(new, keys=written[0], values=written[1], spec=spec, **how)
    mx.eval(q)  # MLX does not know that the store is written
    return [*written, q]


def new_latents(dtype, bits=None, factor=1.0):
    """Rows of two products, the last slot of the store among the written, and one without."""
    latent_dim, rope = 128, 24
    q = draw(5, GROUP * 40, seed=9, dtype=dtype)
    kv = draw(5, latent_dim + rope, seed=13, dtype=dtype)
    norm = RMSNorm(draw(latent_dim, seed=10, dtype=dtype), 1e-5)
    columns = Columns(q, 16), 40, GROUP, Columns(kv, 0), Columns(kv, latent_dim)
    new = NewLatents(*columns, norm, Rope(20, True, 1e4, 1.0, None, factor))
    return written_by(latent_write, new, LayerSpec(1, latent_dim, rope, dtype, bits=bits))


def rope_write_rows(dtype, bits=None, factor=1.0):
    """Rows joined, not a head for every simdgroup, the last slot of the store among the written."""
    new = new_rows(5, 6, dtype, seed=9, factor=factor)
    return written_by(rope_write, new, spec_of(dtype, bits))


def rope_write_in_turns(dtype):
    """Of as many rows as a long prompt has: a simdgroup takes several heads, one after another."""
    with pytest.MonkeyPatch.context() as patch:
        change_device(patch, rope_many_rows=4)
        return rope_write_rows(dtype, 4)


def in_16_bits(run):
    """For kernels without float32: bfloat16 instead of it, and results in float32."""

    @wraps(run)
    def call(dtype, **how):
        results = run(mx.bfloat16 if dtype == mx.float32 else dtype, **how)
        return [result.astype(mx.float32) for result in results]

    return call


def add_rms_norm_rows(dtype, post_norm=False):
    """Rows of more than one simdgroup, the last has idle threads."""
    x, y = (draw(3, 200, seed=seed, dtype=dtype) for seed in (11, 30))
    weight = draw(200, seed=11, dtype=dtype)
    norm = RMSNorm(weight, 1e-3) if post_norm else None
    return list(add_rms_norm(x, y, weight, 1e-5, norm))


def gathered_rows(dtype):
    return [gather_rows(draw(7, 40, seed=12, dtype=dtype), mx.array([[6, 0], [6, 3]], mx.int32))]


@in_16_bits
def skinny_gemm_rows(dtype):
    """Of 16 bits.  Sums of some rows and then of others, the last tiles of both sides not full, and
    simdgroups with unlike numbers of chunks."""
    x, weight = (draw(rows, 928, seed=14, dtype=dtype) for rows in (53, 40))
    return [skinny_gemm(x, weight, plan=GemmPlan(8, 2))]


@in_16_bits
def skinny_gemm_with_all(dtype):
    """A norm before the product, SwiGLU and a residual sum after it: of few rows, and of rows
    whose sums are held in turns.  Rows are of unlike size."""
    weight, gain = draw(42, 928, seed=14, dtype=dtype) / 30, draw(928, seed=15, dtype=dtype)
    results = []
    for rows in (11, 53):
        sizes = mx.arange(1, rows + 1)[:, None].astype(dtype)
        x, residual = draw(rows, 928, seed=16, dtype=dtype) * sizes, draw(rows, 21, seed=17)
        how = {"norm": RMSNorm(gain, 1e-5), "residual": residual.astype(dtype), "gate": "silu"}
        results.append(skinny_gemm(x, weight, plan=GemmPlan(8, 2), **how))
    return results


@in_16_bits
def skinny_gemm_of_words(dtype, how, depth=928, columns=16):
    """Weights of unlike size in each group, with all; loads at once, alone and of fewer chunks."""
    sizes = mx.repeat(mx.arange(1, depth // how.group_size + 1), how.group_size) / 8
    weight = quantised_weight((draw(42, depth, seed=14) * sizes / depth**0.5).astype(dtype), how)
    x, gain, bias, residual = (
        draw(*shape, seed=seed).astype(dtype)
        for seed, shape in enumerate([(11, depth), (depth,), (42,), (11, 21)], 15)
    )
    plan = GemmPlan(2, 2, spread_of(shape_of(weight)), columns)
    how = {"norm": RMSNorm(gain, 1e-5), "bias": bias, "residual": residual}
    return [skinny_gemm(x, weight, gate="gelu_approx", plan=plan, **how)]


@in_16_bits
def skinny_gemm_in_lanes(dtype):
    """Three rows of unlike size, with all and with nothing but the product."""
    how = Quantisation(4, 32)
    weight = quantised_weight((draw(42, 928, seed=14) / 30).astype(dtype), how)
    x = (draw(3, 928, seed=15) * mx.array([[1.0], [2], [5]])).astype(dtype)
    gain, bias, residual = (
        draw(*shape, seed=seed).astype(dtype)
        for seed, shape in enumerate([(928,), (42,), (3, 21)], 16)
    )
    plan = GemmPlan(2, 2, 4, 16, in_lanes=True)
    how = {"norm": RMSNorm(gain, 1e-5), "bias": bias, "residual": residual, "gate": "silu"}
    return [skinny_gemm(x, weight, plan=plan, **how), skinny_gemm(x, weight, plan=plan)]


GPT_OSS = Activation("clamped_swiglu", 1.702, 7.0)
# Of 3 experts: one of more pairs than a tile, one of padding's only.
CHOSEN = np.array([[0, 2]] * 3 + [[2, 0]] * 2 + [[2, 2]] * 6 + [[1, 0]] * 5)
LIVE = 11
RENORMALIZED = Routing("softmax", True, "renormalized")


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


@in_16_bits
def expert_gemm(dtype, how=None, activation=GPT_OSS):
    """gpt-oss's gate and up with biases, rows of unlike size; loads at once, alone and of fewer
    chunks.  Columns do not fill a threadgroup."""
    made = draw_experts(3, 928, 36, dtype, how, activation, bias=True)
    sizes = mx.arange(1, len(CHOSEN) + 1)[:, None]
    x = (draw(len(CHOSEN), 928, seed=19) * sizes / 4).astype(dtype)
    plan = GemmPlan(2, 2, 1 if how is None else spread_of(shape_of(made.gate.weight)))
    pairs, tiles = mx.array(CHOSEN.reshape(-1)), plan_of(CHOSEN, 3, 16, LIVE)
    gated = {"up": made.up, "activation": made.activation}
    return [experts.expert_product(x, pairs, tiles, made.gate, share=2, plan=plan, **gated)]


@in_16_bits
def expert_gemm_in_lanes(dtype):
    """Four rows of unlike size; experts have three, one and none."""
    chosen, how = np.array([[2], [0], [2], [2]]), Quantisation(4, 32)
    made = draw_experts(3, 928, 36, dtype, how, GPT_OSS, bias=True)
    x = (draw(4, 928, seed=19) * mx.array([[0.5], [1], [2], [3]])).astype(dtype)
    pairs, plan = mx.array(chosen.reshape(-1)), GemmPlan(2, 2, 4, 16, in_lanes=True)
    gated = {"up": made.up, "activation": made.activation}
    tiles = plan_of(chosen, 3, 4)
    return [experts.expert_product(x, pairs, tiles, made.gate, plan=plan, **gated)]


@in_16_bits
def expert_gemm_down(dtype):
    """Without a gate: 16 columns of one weight."""
    x = draw(CHOSEN.size, 96, seed=20).astype(dtype)
    weight = ExpertWeight(draw(3, 40, 96, seed=21).astype(dtype))
    pairs, tiles = mx.array(CHOSEN.reshape(-1)), plan_of(CHOSEN, 3, 16, LIVE)
    return [experts.expert_product(x, pairs, tiles, weight)]


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
    "expert_topk": partial(expert_topk, routing=RENORMALIZED),
    "expert_topk/bias": expert_topk_with_a_bias,
    "expert_topk/logits": expert_topk_of_negatives,
    "expert_topk/large": partial(expert_topk, routing=RENORMALIZED, shift=300.0),
    "expert_plan": expert_plan,
    "expert_gemm": expert_gemm,
    "expert_gemm/mxfp4": partial(expert_gemm, how=Quantisation(4, 32, "mxfp4")),
    "expert_gemm/gelu": partial(expert_gemm, activation=Activation("geglu")),
    "expert_gemm/relu2": partial(expert_gemm, activation=Activation("relu2")),
    "expert_gemm/down": expert_gemm_down,
    "expert_gemm/lanes": expert_gemm_in_lanes,
    "expert_sum": expert_sum,
    "causal_conv": causal_conv_rows,
    "gated_delta": partial(recurrent_rows, form="columns"),
    "gated_delta/ssm": partial(recurrent_rows, form="ssm"),
    "gated_delta/fused": partial(recurrent_rows, form="logits"),
    "gated_delta/fused_ssm": partial(recurrent_rows, form="ssm of logits"),
    "gated_rms_norm": gated_norm_rows,
    "gated_rms_norm/long": partial(gated_norm_rows, groups=1, dim=900),
    "gather_rows": gathered_rows,
    "kv_write": kv_write,
    "kv_gather": kv_gather,
    "paged_decode": paged_decode,
    "merge_partitions": merge_partitions,
    "varlen_prefill": varlen_prefill_rows,
    "latent_attention": latent_rows,
    "latent_write": new_latents,
    "latent_write/quantised": partial(new_latents, bits=4),
    "latent_write/scaled": partial(new_latents, factor=FACTOR),
    "latent_attention/splits": partial(latent_rows, splits=3),
    "latent_attention/quantised": partial(latent_rows, dims=(128, 24), bits=4),
    "varlen_prefill/quantised": partial(varlen_prefill_rows, bits=4),
    "kv_write_quantised": partial(kv_write, bits=4),
    "kv_write_quantised/wide": wide_kv_write,
    "kv_gather_quantised": partial(kv_gather, bits=4),
    "paged_decode/quantised": partial(paged_decode, bits=4),
    "paged_decode/fused": fused_decode,
    "paged_decode/scaled": partial(fused_decode, factor=FACTOR),
    "paged_decode/fused_quantised": partial(fused_decode, bits=4),
    "rope_write/quantised_in_turns": rope_write_in_turns,
    "rope_write/quantised": partial(rope_write_rows, bits=4),
    "shared_prefix": shared_prefix_rows,
    "shared_prefix/fused": shared_prefix_of_new_rows,
    "shared_prefix/scaled": partial(shared_prefix_of_new_rows, factor=FACTOR),
    "shared_prefix/quantised": partial(shared_prefix_rows, dim=128, bits=8),
    "paged_decode/prefix": decode_behind_a_prefix,
    # The prefix in more splits than both look at side by side.
    "paged_decode/prefix_splits": partial(decode_behind_a_prefix, splits=40, plan=(2, 2)),
    "rope_write": rope_write_rows,
    "rope_write/scaled": partial(rope_write_rows, factor=FACTOR),
    "add_rms_norm": add_rms_norm_rows,
    "add_rms_norm/post": partial(add_rms_norm_rows, post_norm=True),
    "skinny_gemm": skinny_gemm_rows,
    "skinny_gemm/all": skinny_gemm_with_all,
    "skinny_gemm/affine": partial(skinny_gemm_of_words, how=Quantisation(4, 32), columns=32),
    "skinny_gemm/lanes": skinny_gemm_in_lanes,
    "skinny_gemm/6": partial(skinny_gemm_of_words, how=Quantisation(6, 64), depth=960),
    "skinny_gemm/mxfp8": partial(skinny_gemm_of_words, how=Quantisation(8, 32, "mxfp8")),
    "skinny_gemm/nvfp4": partial(skinny_gemm_of_words, how=Quantisation(4, 16, "nvfp4")),
}
