"""A residual sum and its RMS norm in one launch."""

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import RMSNorm, norm_dtype
from vllm_metal_lite.kernels.launch import Kernel, Template, bits, check_array

_ADD_RMS_NORM = Kernel("add_rms_norm", ["x", "y", "weight", "y_weight"], ["sum", "normed"])

# The most threads of a threadgroup.  For a long row, 1,024 threads do not have enough registers.
_THREADS, _LONG_ROW, _THREADS_OF_LONG_ROWS = 1024, 12288, 512


def add_rms_norm(
    x: mx.array, y: mx.array, weight: mx.array | None, eps: float, post_norm: RMSNorm | None = None
) -> tuple[mx.array, mx.array]:
    """x + y, and mx.fast.rms_norm(x + y, weight, eps), for rows x, y of at least 8 elements.

    x, y: (N, D) or (N, 1, D), of one floating type.  weight: (D,), of any floating type; None:
    ones.  post_norm: x + this norm of y replaces x + y.  Both results have the shape of x.  The sum
    has the type of x.  The norm has the type that mx.fast.rms_norm returns: that of x, or float32
    if weight has another type.
    """
    dim = x.shape[-1]
    y_weight, y_eps = post_norm or RMSNorm(None, 0.0)
    check_array("y", y, x.shape, x.dtype)
    check_array("weight", weight, (dim,))
    check_array("weight of the post norm", y_weight, (dim,), x.dtype)
    vector = 4 if dim % 4 == 0 else 1  # elements that a thread reads at once
    result = norm_dtype(x.dtype, weight)
    most = _THREADS if dim <= _LONG_ROW else _THREADS_OF_LONG_ROWS
    threads = min(most, -(-dim // (32 * vector)) * 32)
    template: Template = {"T": x.dtype, "R": result, "DIM": dim, "VEC": vector, "THREADS": threads}
    template |= {"WEIGHT": weight is not None, "EPS": bits(eps), "Y_NORM": post_norm is not None}
    template |= {"Y_WEIGHT": y_weight is not None, "Y_EPS": bits(y_eps)}
    inputs = [x, y, weight, y_weight]
    grid, outputs = (x.size // dim, 1, 1), [(x.shape, x.dtype), (x.shape, result)]
    added, normed = _ADD_RMS_NORM(inputs, template, grid, threads, outputs)
    return added, normed
