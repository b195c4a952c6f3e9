"""The host proves itself on kernels that are not ours: MLX's and mlx-lm's, against float64.

Cases run plainly and, mostly, under the checker, each with threads in two orders: the results have
to be the same to the bit, and right.  A report fails the test, for these kernels are correct.
"""

import mlx.core as mx
import numpy as np
import pytest

from tests.support.host import foreign_kernels as foreign
from tests.support.host.foreign_runs import (
    DTYPES,
    check_close,
    random,
    run_mlx,
    softmax,
    sort,
    with_all_options,
)
from tests.support.kernels.arrays import floats

dtypes = pytest.mark.parametrize("dtype", DTYPES)


# --- rows: softmax, logsumexp, sort ---------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("width", [1, 33, 1000])
def test_softmax(dtype, width):
    dispatch, expected = softmax(dtype, 3, width)
    check_close(*with_all_options(dispatch.run, checked=dtype == "float"), expected, dtype)


def test_softmax_looped():
    dispatch, expected = softmax("float", 2, 5003, looped=True)
    check_close(*with_all_options(dispatch.run), expected, "float")


@dtypes
def test_logsumexp(dtype):
    x, x64 = random((3, 700), dtype)
    call = foreign.metal("logsumexp.h"), f"logsumexp<{dtype}, float>"
    buffers = [x, ((3,), x.dtype), np.int32(700)]
    (y,) = run_mlx(*call, buffers, (3, 1, 1), (192, 1, 1), checked=dtype == "float")
    check_close(y, np.log(np.exp(x64).sum(-1)), dtype)


@pytest.mark.parametrize("width", [5, 200, 256])
def test_sort(width):
    dispatch, expected = sort(3, width)
    (y,) = with_all_options(dispatch.run)
    assert np.array_equal(floats(y), expected)


# --- affine quantised matrices --------------------------------------------------------------------


QUANTISED = foreign.metal("quantized.h", before=("steel/gemm/gemm.h", "quantized_utils.h"))


def quantised(rows, columns, group, bits, dtype):
    """Packed weights, scales and biases, and their values in float64."""
    w = random((rows, columns), "float", 1)[0]
    packed, scales, biases = mx.quantize(w, group_size=group, bits=bits)
    scales, biases = scales.astype(DTYPES[dtype]), biases.astype(DTYPES[dtype])
    one = mx.ones(scales.shape)
    levels = floats(mx.dequantize(packed, one, 0 * one, group_size=group, bits=bits))
    spread = [np.repeat(floats(a), group, -1) for a in (scales, biases)]
    return (packed, scales, biases), levels * spread[0] + spread[1]


@pytest.mark.parametrize(
    ("dtype", "bits", "rows", "columns", "kernel"),
    [
        ("float", 3, 16, 512, "affine_qmv_fast"),
        ("half", 4, 16, 1024, "affine_qmv_fast"),
        ("bfloat16_t", 6, 16, 512, "affine_qmv_fast"),
        ("float", 8, 16, 512, "affine_qmv_fast"),
        ("half", 3, 16, 192, "affine_qmv"),
        ("bfloat16_t", 4, 16, 192, "affine_qmv"),
        ("float", 6, 16, 192, "affine_qmv"),
        ("bfloat16_t", 8, 16, 192, "affine_qmv"),
    ],
)
def test_affine_matvec(dtype, bits, rows, columns, kernel):
    group, batch = 64, 2
    packed, w = quantised(rows, columns, group, bits, dtype)
    x, x64 = random((batch, columns), dtype, 2)
    buffers = [*packed, x, ((batch, rows), x.dtype), np.int32(columns), np.int32(rows)]
    call = QUANTISED, f"{kernel}<{dtype}, {group}, {bits}, false>", buffers
    (y,) = run_mlx(*call, (batch, -(-rows // 8), 1), (32, 2, 1))
    check_close(y / columns**0.5, x64 @ w.T / columns**0.5, dtype)


@pytest.mark.parametrize("dtype", ["float", "bfloat16_t"])
def test_affine_matmul(dtype):
    """Quantised weights in threadgroup memory, products by simdgroup matrices, ragged edges."""
    group, bits, rows, columns, tokens = 64, 4, 40, 128, 37
    packed, w = quantised(rows, columns, group, bits, dtype)
    x, x64 = random((tokens, columns), dtype, 2)
    sizes = (np.int32(n) for n in (columns, rows, tokens))
    buffers = [*packed, x, ((tokens, rows), x.dtype), *sizes]
    call = QUANTISED, f"affine_qmm_t<{dtype}, {group}, {bits}, false, false>", buffers
    (y,) = run_mlx(*call, (-(-rows // 32), -(-tokens // 32), 1), (32, 2, 2))
    check_close(y / columns**0.5, x64 @ w.T / columns**0.5, dtype)


# --- norms and rotations of mlx-lm ----------------------------------------------------------------


def rms_norm(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rotate(x, positions, base):
    """RoPE of (..., dim), neighbours turned together, at `positions`, which broadcasts against all
    but the last axis."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * positions[..., None] * base ** (-np.arange(half) / half))
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * turn
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def run_mlx_lm(name, dtype):
    """Run one of mlx-lm's kernels with all options; its inputs in float64 and its outputs."""
    call = foreign.mlx_lm_call(name, DTYPES[dtype])
    outputs = with_all_options(lambda options: call.kernel(**call.arguments, options=options))
    return [floats(a) for a in call.inputs], outputs


@pytest.mark.parametrize("dtype", ["float", "bfloat16_t"])
def test_mlx_lm_qk_norm_rope(dtype):
    (qkvg, scale, eps, offsets, *_), (q, k) = run_mlx_lm("qk_norm_rope", dtype)
    heads = rms_norm(qkvg.reshape(2, 5, 12, 64)[:, :, :6], eps)
    positions = (offsets[:, None] + np.arange(5))[..., None]
    turned = rotate(heads, positions, 1e4)
    # The norm is rounded before it is scaled and turned, so an error of each adds.
    check_close(q / 4, turned[:, :, :4] * scale / 4, dtype)
    check_close(k / 2, turned[:, :, 4:] / 2, dtype)


@pytest.mark.parametrize("dtype", ["float", "bfloat16_t"])
def test_mlx_lm_norm_add_norm(dtype):
    inputs, (stream, normed) = run_mlx_lm("norm_add_norm", dtype)
    branch, old, alpha, beta, post_weight, post_eps, pre_weight, pre_eps = inputs
    expected = alpha * old + beta * rms_norm(post_weight * branch, post_eps)
    check_close(stream / 4, expected / 4, dtype)
    check_close(normed / 4, rms_norm(expected, pre_eps) * pre_weight / 4, dtype)


def test_mlx_lm_expert_routing():
    inputs, (experts, weights) = run_mlx_lm("expert_routing", "float")
    logits, bias, multiplier, eps, scale = inputs
    scores = 1 / (1 + np.exp(-multiplier * logits))
    best = np.argsort(-(scores + bias), -1)[:, :6]
    assert np.array_equal(np.array(experts), best)
    chosen = np.take_along_axis(scores, best, -1)
    check_close(weights, chosen / (chosen.sum(-1, keepdims=True) + eps) * scale, "float")
