"""Shared parts of the kernels' wrappers.

Every function that uses the store takes a ticket and returns the next one.  Pass each function
exactly the ticket that the previous one returned (metal/kv_write.metal says why).  A ticket is a
float32 array of any shape; its values mean nothing.

Shapes: B sequences, N packed rows.  Metadata is int32.
"""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import numpy as np

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, Template
from vllm_metal_lite.kv.store import LayerSpec
from vllm_metal_lite.specs import AttentionShape

# The last inputs of a kernel that uses the store.
STORE = ("keys", "values", "ticket")
# Most splits of a context.
MAX_SPLITS = 64
TICKET_SHAPE = (MIN_ELEMENTS,)
# Largest head sizes.
MAX_DECODE_DIM, MAX_PREFILL_DIM = 576, 256
# Largest latent and rotary key.
MAX_LATENT_DIM, MAX_ROPE_DIM = 512, 64


def check_array(
    name: str, array: mx.array | None, shape: tuple[int, ...], dtype: mx.Dtype | None = None
) -> None:
    """Raise ValueError unless an array, if given, has this shape, and this type, if given.

    A kernel would read or write outside of another array, without an error.
    """
    if array is None:
        return
    if array.shape != shape or (dtype is not None and array.dtype != dtype):
        wanted = shape if dtype is None else f"{shape} {dtype}"
        raise ValueError(f"{name} must be {wanted}, not {array.shape} {array.dtype}")


class LayerStore(NamedTuple):
    """K and V of one layer, and the ticket.

    keys: (slots, num_kv_heads, k_head_dim).  values: (slots, num_kv_heads, v_head_dim).  Rows are
    words instead if `spec` has 8 or 4 bits per value.  block_size: 0 for kernels that take slots.
    """

    keys: mx.array
    values: mx.array
    ticket: mx.array
    spec: LayerSpec
    block_size: int = 0

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The inputs STORE."""
        return self[:3]

    @property
    def formats(self) -> Template:
        """Template values for the formats of the rows."""
        k_row, v_row = self.spec.k_row, self.spec.v_row
        bits = k_row.bits or 8 * k_row.dtype.size
        return {"BITS": bits, "K_GROUP": k_row.group_size, "V_GROUP": v_row.group_size}

    @property
    def template(self) -> Template:
        """Template values for the sizes and the formats of the rows."""
        return {"K_DIM": self.spec.k_head_dim, "V_DIM": self.spec.v_head_dim, **self.formats}


class RMSNorm(NamedTuple):
    """An RMS norm of the last axis, (.., D).  weight: (D,); None: ones."""

    weight: mx.array | None
    eps: float


def num_splits(most: int, num_keys: int, min_keys: int) -> int:
    """Splits of num_keys: at most `most`, with at least min_keys each.

    A power of two, so that few variants of a compiled step exist.
    """
    splits = max(1, min(most, num_keys // min_keys, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


def unsupported(shape: AttentionShape, prefill: bool = False) -> str | None:
    """Why the kernels (prefill: `varlen_prefill`) cannot serve this shape, or None if they can."""
    if shape.attention_chunk is not None:
        return "there is no kernel for chunked attention yet"
    if shape.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return f"there are no kernels for {shape.dtype}"
    if shape.latent:
        if shape.window is not None or shape.softcap is not None or shape.sinks:
            return "latent_attention has no windows, softcaps and sinks"
        return latent_problem(shape.k_head_dim, shape.v_head_dim)
    largest = MAX_PREFILL_DIM if prefill else MAX_DECODE_DIM
    return head_size_problem((shape.k_head_dim, shape.v_head_dim), largest)


def head_size_problem(dims: Iterable[int], largest: int) -> str | None:
    """Why a kernel cannot serve heads of these sizes, or None if it can."""
    for dim in dims:
        if dim % 8 or not 8 <= dim <= largest:
            return f"head size {dim} is not a multiple of 8 up to {largest}"
    return None


def tiles_serve(k_head_dim: int, v_head_dim: int) -> bool:
    """Whether `varlen_prefill` and `shared_prefix` serve heads of these sizes."""
    return head_size_problem((k_head_dim, v_head_dim), MAX_PREFILL_DIM) is None


def latent_problem(latent_dim: int, rope: int) -> str | None:
    """Why `latent_attention` cannot serve latents and rotary keys of these sizes, or None."""
    fits = 8 <= latent_dim <= MAX_LATENT_DIM
    if not fits or latent_dim % (64 if latent_dim > MAX_ROPE_DIM else 8):
        most = f"64 up to {MAX_LATENT_DIM}, or of 8 up to {MAX_ROPE_DIM}"
        return f"latent size {latent_dim} is not a multiple of {most}"
    if rope % 8 or not 8 <= rope <= MAX_ROPE_DIM:
        return f"rotary size {rope} of latents is not a multiple of 8 up to {MAX_ROPE_DIM}"
    return None


def new_ticket() -> mx.array:
    """The first ticket of a store, before any write."""
    return mx.zeros(TICKET_SHAPE)


@cache
def bits(x: float) -> int:
    """The bits of a float32: a template value must be an integer."""
    return int(np.float32(x).view(np.int32))


def grid_for(count: int) -> tuple[int, int]:
    """Threads of a threadgroup (a multiple of 32, at most 256) and threadgroups for `count`."""
    threads = min(256, -(-count // 32) * 32)
    return threads, -(-count // threads)


def norm_dtype(dtype: mx.Dtype, weight: mx.array | None) -> mx.Dtype:
    """The result type of an RMS norm, as MLX promotes floating types."""
    return dtype if weight is None or weight.dtype == dtype else mx.float32
