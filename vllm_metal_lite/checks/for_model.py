"""The checks of the kernels that one model uses, and no others."""

from collections.abc import Sequence
from dataclasses import replace

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.check import Check, MixtureShape, NormShape, ProductShape
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.served_shapes import attention_problem, sees_prefixes
from vllm_metal_lite.kernels.skinny_gemm import MAX_ROWS, multiplies_in_lanes
from vllm_metal_lite.specs import (
    AttentionShape,
    ConvShape,
    GatedNormShape,
    KernelUse,
    RecurrenceShape,
    RopeShape,
    WeightShape,
)

# Rows of a product that do not fill a tile.
_FEW_ROWS = 5
# Rows that are multiplied with quantised weights without instructions for matrices.  One row has a
# kernel source of its own; 2 to 4 share one.  The bias and GeGLU come behind the sums, where all
# rows share the source.
_LANE_ROWS = (1, 3)
# The kernels of recurrent layers.  `gated_delta` also computes the state space update.
_RECURRENT = {
    ConvShape: "causal_conv",
    RecurrenceShape: "gated_delta",
    GatedNormShape: "gated_rms_norm",
}


def checks_for(use: KernelUse) -> list[Check]:
    """Each kernel at the model's shapes, in the order in which they build on each other."""
    checks: list[Check] = []
    for shape in use.shapes:
        checks += _attention(shape, use)
    for shape, rope in _pairs(use):
        checks += _new_rows(shape, rope, use)
    checks += [Check("latent_write", shape, 0, rope) for shape, rope in _latent_pairs(use)]
    checks += [Check(_RECURRENT[type(shape)], shape) for shape in use.recurrences]
    dtype = next((shape.dtype for shape in (*use.shapes, *use.recurrences)), mx.float32)
    checks += [Check("add_rms_norm", NormShape(size, dtype)) for size in use.hidden_sizes]
    if dtype != mx.float32:
        checks += _products(use.weights, dtype)
        kernels = "expert_topk", "expert_plan", "expert_gemm", "expert_sum"
        mixtures = [MixtureShape(experts, dtype) for experts in use.experts]
        checks += [Check(kernel, mixture) for mixture in mixtures for kernel in kernels]
    return list(dict.fromkeys(checks))


def _products(weights: Sequence[WeightShape], dtype: mx.Dtype) -> list[Check]:
    """Checks each quantisation at its least and its greatest depth."""
    checks: list[Check] = []
    for how in dict.fromkeys(weight.quantisation for weight in weights):
        by_depth = sorted((w for w in weights if w.quantisation == how), key=lambda w: w.depth)
        ends = by_depth[0], by_depth[-1]
        products = [(_FEW_ROWS, ends[0], False), (MAX_ROWS, ends[1], True)]
        if multiplies_in_lanes(1, ends[0]):
            most = profile().max_lane_rows
            lanes = zip(_LANE_ROWS, ends, strict=True)
            products += [(min(rows, most), weight, False) for rows, weight in lanes]
        checks += [
            Check("skinny_gemm", ProductShape(rows, weight, dtype, biased))
            for rows, weight, biased in products
        ]
    return checks


def _heads_only(shape: AttentionShape) -> AttentionShape:
    """The fields that affect queries; masks and the format of the store do not."""
    return replace(_rows_only(shape), kv_bits=None)


def _rows_only(shape: AttentionShape) -> AttentionShape:
    """The fields that affect stored rows; masks do not."""
    heads, dims = (shape.num_heads, shape.num_kv_heads), (shape.k_head_dim, shape.v_head_dim)
    return AttentionShape(*heads, *dims, shape.dtype, kv_bits=shape.kv_bits)


def _attention(shape: AttentionShape, use: KernelUse) -> list[Check]:
    """The kernels that read and write the store."""
    rows, size = _rows_only(shape), use.block_size
    suffix = "" if shape.kv_bits is None else "_quantised"
    checks = [Check(f"kv_write{suffix}", rows, size), Check(f"kv_gather{suffix}", rows, size)]
    if shape.latent:
        names = "latent_attention", "merge_partitions", "latent_prefill"
        checks += [Check(name, shape, size) for name in names]
        wide = replace(shape, k_head_dim=shape.k_head_dim + shape.v_head_dim)
        return [*checks, Check("gather_rows", _heads_only(wide))]
    checks += [Check("paged_decode", shape, size), Check("merge_partitions", shape, size)]
    if use.shares_prefix and sees_prefixes(shape):
        checks.append(Check("shared_prefix", shape, size))
        checks.append(Check("merge_partitions", shape, size, beside=("shared_prefix",)))
    if attention_problem(shape, prefill=True) is None:
        checks.append(Check("varlen_prefill", shape, size))
    checks.append(Check("gather_rows", _heads_only(shape)))
    return checks


def _pairs(use: KernelUse) -> list[tuple[AttentionShape, RopeShape]]:
    """Each shape and each rotation at least once, not each with each."""
    found = []
    for dim in sorted({shape.k_head_dim for shape in use.shapes}):
        shapes = [s for s in use.shapes if s.k_head_dim == dim and not s.latent]
        ropes = [r for r in use.ropes if r.dims % 2 == 0 and 2 <= r.dims <= dim]
        for i in range(max(len(shapes), len(ropes)) if shapes and ropes else 0):
            found.append((shapes[i % len(shapes)], ropes[i % len(ropes)]))
    return found


def _latent_pairs(use: KernelUse) -> list[tuple[AttentionShape, RopeShape]]:
    """Latent shapes with the rotations of their rotary keys, which are not normalised."""
    return [
        (_rows_only(shape), replace(rope, eps=None))
        for shape in use.shapes
        for rope in use.ropes
        if shape.latent and rope.dims == shape.v_head_dim
    ]


def _new_rows(shape: AttentionShape, rope: RopeShape, use: KernelUse) -> list[Check]:
    """The kernels that take rows as the projections return them."""
    size = use.block_size
    checks = [
        Check("rope_write", _rows_only(shape), 0, rope),
        Check("fused_decode", shape, size, rope),
        Check("merge_partitions", shape, size, rope, ("fused_decode",)),
    ]
    if use.shares_prefix and sees_prefixes(shape):
        checks.append(Check("shared_prefix", shape, size, rope, ("fused_decode",)))
    return checks
