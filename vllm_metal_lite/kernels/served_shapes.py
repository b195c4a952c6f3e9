"""The shapes that the kernels of attention and of recurrent layers serve."""

from collections.abc import Iterable

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.specs import AttentionShape, ConvShape, GatedNormShape, RecurrentShape

_FLOATS = mx.float32, mx.float16, mx.bfloat16
# The largest head sizes.
_MAX_DECODE_DIM, _MAX_PREFILL_DIM = 576, 256
# The largest sizes of a latent and of a rotary key.
_MAX_LATENT_DIM, _MAX_ROPE_DIM = 512, 64
# The largest heads of a recurrence: of q and k, which lie in threadgroup memory, and of v.
_MAX_K_DIM, _MAX_V_DIM = 256, 1024
# The longest convolution: the rows before a row stay in registers.
_MAX_KERNEL_SIZE = 8


def attention_problem(shape: AttentionShape, prefill: bool = False) -> str | None:
    """Why the kernels (prefill: `varlen_prefill`) cannot serve this shape, or None if they can."""
    if shape.attention_chunk is not None:
        return "there is no kernel for chunked attention yet"
    if shape.dtype not in _FLOATS:
        return f"there are no kernels for {shape.dtype}"
    dims = shape.k_head_dim, shape.v_head_dim
    if shape.latent:
        if shape.window is not None or shape.softcap is not None or shape.sinks:
            return "latent_attention does not support windows, softcaps or sinks"
        return _latent_problem(*dims)
    return _head_size_problem(dims, _MAX_PREFILL_DIM if prefill else _MAX_DECODE_DIM)


def _head_size_problem(dims: Iterable[int], largest: int) -> str | None:
    """Why a kernel cannot serve heads of these sizes, or None if it can."""
    for dim in dims:
        if dim % 8 or not 8 <= dim <= largest:
            return f"head size {dim} is not a multiple of 8 up to {largest}"
    return None


def sees_prefixes(layer: AttentionShape | LayerSpec) -> bool:
    """Whether `shared_prefix` supports a layer without latents."""
    dims = layer.k_head_dim, layer.v_head_dim
    return layer.window is None and _head_size_problem(dims, _MAX_PREFILL_DIM) is None


def _latent_problem(latent_dim: int, rope: int) -> str | None:
    """Why `latent_attention` cannot serve latents and rotary keys of these sizes, or None."""
    fits = 8 <= latent_dim <= _MAX_LATENT_DIM
    if not fits or latent_dim % (64 if latent_dim > _MAX_ROPE_DIM else 8):
        most = f"64 up to {_MAX_LATENT_DIM}, or of 8 up to {_MAX_ROPE_DIM}"
        return f"latent size {latent_dim} is not a multiple of {most}"
    if rope % 8 or not 8 <= rope <= _MAX_ROPE_DIM:
        return f"rotary size {rope} of latents is not a multiple of 8 up to {_MAX_ROPE_DIM}"
    return None


def recurrence_problem(shape: RecurrentShape) -> str | None:
    """Why the kernels cannot serve a part of a recurrent layer, or None if they can.

    Without `gated_rms_norm`, MLX's operations compute the gated norm.
    """
    if isinstance(shape, GatedNormShape):
        return None
    if shape.dtype not in _FLOATS:
        return f"there are no kernels for {shape.dtype}"
    if isinstance(shape, ConvShape):
        served = 2 <= shape.kernel_size <= _MAX_KERNEL_SIZE and shape.channels >= MIN_ELEMENTS
        return None if served else f"there is no kernel for a {shape}"
    if shape.k_dim % 16 or not 16 <= shape.k_dim <= _MAX_K_DIM:
        return f"key size {shape.k_dim} is not a multiple of 16 up to {_MAX_K_DIM}"
    return _head_size_problem((shape.v_dim,), _MAX_V_DIM)
