"""A small launch of every kernel of norms, products and experts, which uses all of its parts."""

from functools import partial, wraps

import numpy as np

from tests.support.kernels.arrays import seeded
from tests.support.kernels.expert_cases import draw_experts, plan_of
from tests.support.kernels.row import EXPERTS, PRODUCTS, KernelTest, ServingCase
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import experts
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.arguments import RMSNorm
from vllm_metal_lite.kernels.expert_topk import Routing
from vllm_metal_lite.kernels.expert_topk import expert_topk as expert_topk_of
from vllm_metal_lite.kernels.experts import Activation, ExpertWeight
from vllm_metal_lite.kernels.skinny_gemm import GemmPlan, skinny_gemm
from vllm_metal_lite.kernels.weight_formats import quantised as quantised_weight
from vllm_metal_lite.kernels.weight_formats import shape_of, spread_of
from vllm_metal_lite.specs import Quantisation


def in_16_bits(run):
    """A run of a kernel that does not take float32: bfloat16 replaces it, and results are
    float32."""

    @wraps(run)
    def call(dtype, **how):
        results = run(mx.bfloat16 if dtype == mx.float32 else dtype, **how)
        return [result.astype(mx.float32) for result in results]

    return call


def add_rms_norm_rows(dtype, post_norm=False):
    """A row takes several SIMD groups; the last has idle threads."""
    x, y = (seeded(3, 200, seed=seed, dtype=dtype) for seed in (11, 30))
    weight = seeded(200, seed=11, dtype=dtype)
    norm = RMSNorm(weight, 1e-3) if post_norm else None
    return list(add_rms_norm(x, y, weight, 1e-5, norm))


@in_16_bits
def skinny_gemm_rows(dtype):
    """Of 16 bits.  Sums of some rows and then of others, the last tiles of both sides not full, and
    simdgroups with unlike numbers of chunks."""
    x, weight = (seeded(rows, 928, seed=14, dtype=dtype) for rows in (53, 40))
    return [skinny_gemm(x, weight, plan=GemmPlan(8, 2))]


@in_16_bits
def skinny_gemm_with_all(dtype):
    """A norm before the product, SwiGLU and a residual sum after it: of few rows, and of rows
    whose sums are held in turns.  Rows are of unlike size."""
    weight, gain = seeded(42, 928, seed=14, dtype=dtype) / 30, seeded(928, seed=15, dtype=dtype)
    results = []
    for rows in (11, 53):
        sizes = mx.arange(1, rows + 1)[:, None].astype(dtype)
        x, residual = seeded(rows, 928, seed=16, dtype=dtype) * sizes, seeded(rows, 21, seed=17)
        how = {"norm": RMSNorm(gain, 1e-5), "residual": residual.astype(dtype), "gate": "silu"}
        results.append(skinny_gemm(x, weight, plan=GemmPlan(8, 2), **how))
    return results


@in_16_bits
def skinny_gemm_of_words(dtype, how, depth=928, columns=16):
    """Weights of unlike size in each group, with all; loads at once, alone and of fewer chunks."""
    sizes = mx.repeat(mx.arange(1, depth // how.group_size + 1), how.group_size) / 8
    weight = quantised_weight((seeded(42, depth, seed=14) * sizes / depth**0.5).astype(dtype), how)
    x, gain, bias, residual = (
        seeded(*shape, seed=seed).astype(dtype)
        for seed, shape in enumerate([(11, depth), (depth,), (42,), (11, 21)], 15)
    )
    plan = GemmPlan(2, 2, spread_of(shape_of(weight)), columns)
    how = {"norm": RMSNorm(gain, 1e-5), "bias": bias, "residual": residual}
    return [skinny_gemm(x, weight, gate="gelu_approx", plan=plan, **how)]


@in_16_bits
def skinny_gemm_in_lanes(dtype):
    """Three rows of unlike size: the product with all fused operations, and alone."""
    how = Quantisation(4, 32)
    weight = quantised_weight((seeded(42, 928, seed=14) / 30).astype(dtype), how)
    x = (seeded(3, 928, seed=15) * mx.array([[1.0], [2], [5]])).astype(dtype)
    gain, bias, residual = (
        seeded(*shape, seed=seed).astype(dtype)
        for seed, shape in enumerate([(928,), (42,), (3, 21)], 16)
    )
    plan = GemmPlan(2, 2, 4, 16, in_lanes=True)
    how = {"norm": RMSNorm(gain, 1e-5), "bias": bias, "residual": residual, "gate": "silu"}
    return [skinny_gemm(x, weight, plan=plan, **how), skinny_gemm(x, weight, plan=plan)]


GPT_OSS = Activation("clamped_swiglu", 1.702, 7.0)
# The choices among 3 experts: one has more pairs than a tile, one has only pairs of padding.
CHOSEN = np.array([[0, 2]] * 3 + [[2, 0]] * 2 + [[2, 2]] * 6 + [[1, 0]] * 5)
LIVE = 11
RENORMALIZED = Routing("softmax", True, "renormalized")


def expert_topk(dtype, routing, *, bias=None, shift=0.0):
    """More rows than a threadgroup serves, more experts than lanes, and equal scores."""
    logits = (mx.round(seeded(6, 40, seed=24) * 4) / 4 + shift).astype(dtype)
    of_float32 = {"dtype": mx.float32, "bias": bias} if bias is not None else {}
    indices, weights = expert_topk_of(logits, 5, routing, **of_float32)
    return [indices, weights.astype(mx.float32)]


def expert_topk_of_negatives(dtype):
    """Negative logits; and both zeros, which are equal."""
    routing, zeros = (
        Routing("logits", True, "softmax"),
        mx.where(seeded(6, 40, seed=25) < 0, -0.0, 0),
    )
    of_zeros = expert_topk_of(zeros.astype(dtype), 5, routing)[0]
    return [*expert_topk(dtype, routing, shift=-8.0), of_zeros]


def expert_topk_with_a_bias(dtype):
    """A score of NaN is chosen, too."""
    bias = np.where(np.arange(40) % 9 == 3, 0.4, np.where(np.arange(40) == 7, np.nan, 0))
    routing = Routing("sigmoid", False, "renormalized", 0.5, 2.5)
    return expert_topk(dtype, routing, bias=mx.array(bias.astype(np.float32)))


def expert_plan(dtype):
    """More pairs than threadgroup memory holds at once."""
    chosen = np.tile(CHOSEN, (35, 1))
    plan = experts.plan_experts(mx.array(chosen), 3, mx.array([len(chosen) - 5], mx.int32))
    return [plan.array]


def expert_plan_of_few(dtype):
    """Fewer than 8 pairs: MLX passes their indices in another address space."""
    return [experts.plan_experts(mx.array(CHOSEN[1:4]), 3).array]


@in_16_bits
def expert_gemm(dtype, how=None, activation=GPT_OSS):
    """gpt-oss's gate and up with biases, rows of unlike size; loads at once, alone and of fewer
    chunks.  Columns do not fill a threadgroup."""
    made = draw_experts(3, 928, 36, dtype, how, activation, bias=True)
    sizes = mx.arange(1, len(CHOSEN) + 1)[:, None]
    x = (seeded(len(CHOSEN), 928, seed=19) * sizes / 4).astype(dtype)
    plan = GemmPlan(2, 2, 1 if how is None else spread_of(shape_of(made.gate.weight)))
    pairs, tiles = mx.array(CHOSEN.reshape(-1)), plan_of(CHOSEN, 3, 16, LIVE)
    gated = {"up": made.up, "activation": made.activation}
    return [experts.expert_product(x, pairs, tiles, made.gate, share=2, plan=plan, **gated)]


@in_16_bits
def expert_gemm_in_lanes(dtype):
    """Four rows of unlike size; the experts have three, one and no rows."""
    chosen, how = np.array([[2], [0], [2], [2]]), Quantisation(4, 32)
    made = draw_experts(3, 928, 36, dtype, how, GPT_OSS, bias=True)
    x = (seeded(4, 928, seed=19) * mx.array([[0.5], [1], [2], [3]])).astype(dtype)
    pairs, plan = mx.array(chosen.reshape(-1)), GemmPlan(2, 2, 4, 16, in_lanes=True)
    gated = {"up": made.up, "activation": made.activation}
    tiles = plan_of(chosen, 3, 4)
    return [experts.expert_product(x, pairs, tiles, made.gate, plan=plan, **gated)]


@in_16_bits
def expert_gemm_down(dtype):
    """The product of one weight, without a gate: a threadgroup has 16 columns."""
    x = seeded(CHOSEN.size, 96, seed=20).astype(dtype)
    weight = ExpertWeight(seeded(3, 40, 96, seed=21).astype(dtype))
    pairs, tiles = mx.array(CHOSEN.reshape(-1)), plan_of(CHOSEN, 3, 16, LIVE)
    return [experts.expert_product(x, pairs, tiles, weight)]


def expert_sum(dtype):
    weights = seeded(5, 3, seed=23, dtype=dtype)
    return [experts.expert_sum(seeded(15, 260, seed=22, dtype=dtype), weights)]


_EXPERT_TOPK = partial(expert_topk, routing=RENORMALIZED)
_OF_EXPERTS = {"use": EXPERTS, "serving": ServingCase(dtype="float16", tiny="qwen3_moe")}
PRODUCT_KERNELS = {
    "add_rms_norm": KernelTest(
        # The mean counts idle lanes.
        ("square / float(DIM)", "square / float(SIMDGROUPS * 32)"),
        {"": add_rms_norm_rows, "post": partial(add_rms_norm_rows, post_norm=True)},
        faults=("is slow",),
    ),
    "skinny_gemm": KernelTest(
        # The sum lacks the last SIMD group.
        ("s < SIMDGROUPS", "s < SIMDGROUPS - 1"),
        {
            "": skinny_gemm_rows,
            "all": skinny_gemm_with_all,
            "affine": partial(skinny_gemm_of_words, how=Quantisation(4, 32), columns=32),
            "lanes": skinny_gemm_in_lanes,
            "6": partial(skinny_gemm_of_words, how=Quantisation(6, 64), depth=960),
            "mxfp8": partial(skinny_gemm_of_words, how=Quantisation(8, 32, "mxfp8")),
            "nvfp4": partial(skinny_gemm_of_words, how=Quantisation(4, 16, "nvfp4")),
        },
        faults=("hangs", "is wrong"),
        use=PRODUCTS,
        serving=ServingCase(dtype="bfloat16"),
    ),
    "expert_topk": KernelTest(
        # An expert is chosen twice.
        ("keys[s] = 0u;\n    }\n  }", "}\n  }"),
        {
            "": _EXPERT_TOPK,
            "bias": expert_topk_with_a_bias,
            "logits": expert_topk_of_negatives,
            "large": partial(_EXPERT_TOPK, shift=300.0),
        },
        **_OF_EXPERTS,
    ),
    "expert_plan": KernelTest(
        # The pairs of an expert are not in order.
        ("plan[to] = part + i", "plan[to] = (part + i) ^ 1"),
        {"": expert_plan, "few": expert_plan_of_few},
        **_OF_EXPERTS,
    ),
    "expert_gemm": KernelTest(
        ("s < SIMDGROUPS", "s < SIMDGROUPS - 1"),
        {
            "": expert_gemm,
            "mxfp4": partial(expert_gemm, how=Quantisation(4, 32, "mxfp4")),
            "gelu": partial(expert_gemm, activation=Activation("geglu")),
            "relu2": partial(expert_gemm, activation=Activation("relu2")),
            "down": expert_gemm_down,
            "lanes": expert_gemm_in_lanes,
        },
        faults=("is wrong", "does not compile"),
        **_OF_EXPERTS,
    ),
    "expert_sum": KernelTest(("c < TOP_K", "c < TOP_K - 1"), {"": expert_sum}, **_OF_EXPERTS),
}
