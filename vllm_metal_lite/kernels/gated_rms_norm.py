"""The norm after a recurrence, and its gate, in one launch."""

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns, columns_template
from vllm_metal_lite.kernels.launch import Kernel, Template, bits, check_array

_GATED_RMS_NORM = Kernel("gated_rms_norm", ["x", "z", "weight"], ["y"])

# The most threads of a threadgroup with one group, and with several groups, each in one SIMD group.
_THREADS, _PACKED_THREADS = 1024, 128
# The longest group that one SIMD group normalises.
_SIMDGROUP_DIM = 512


def gated_rms_norm(
    x: mx.array,
    z: Columns,
    weight: mx.array,
    eps: float,
    *,
    dim: int,
    gate_first: bool = False,
    sigmoid: bool = False,
) -> mx.array:
    """rms_norm(x) * weight * silu(z) for rows of x, normalised in groups of dim -> like x.

    x: (N, ...), N rows.  z: the gate, with as many columns as x.  weight: (dim,), or one
    for all elements of a row.  gate_first: rms_norm(x * silu(z)) * weight instead.  sigmoid: not
    SiLU.  x, z and weight are of one type.  metal/gated_rms_norm.metal lists the roundings.
    """
    rows, width, dtype = len(x), x.size // max(len(x), 1), x.dtype
    check_array("x", x.reshape(rows, width), (rows, width // dim * dim))
    columns, wide = columns_template("z", z, rows, width, dtype), weight.size > dim
    check_array("weight", weight, (width if wide else dim,), dtype)
    apart = dim, z.start, z.array.shape[-1]
    vector = 4 if all(n % 4 == 0 for n in apart) else 1  # elements that a thread reads at once
    groups, threads = width // dim, min(_THREADS, -(-dim // (32 * vector)) * 32)
    pack = 1
    if dim <= _SIMDGROUP_DIM:
        threads, pack = 32, min(groups, _PACKED_THREADS // 32)
    template: Template = columns | {"T": dtype, "DIM": dim, "GROUPS": groups, "VEC": vector}
    template |= {"THREADS": threads, "PACK": pack, "WIDE": wide}
    template |= {"GATE_FIRST": gate_first, "SIGMOID": sigmoid, "EPS": bits(eps)}
    inputs, grid = [x, z.array, weight], (-(-groups // pack), rows, 1)
    (y,) = _GATED_RMS_NORM(inputs, template, grid, threads * pack, [(x.shape, dtype)])
    return y
