"""Origins and rules of heads: from the columns of a product to attention, and to its result.

    q = q_proj(x)                         Columns
    q = q.reshape(N, 1, heads, dim)       Heads
    q = mx.fast.rms_norm(q, ...)          Heads, with a norm
    q = q.transpose(0, 2, 1, 3)           the same: (N, heads, 1, dim) has this memory layout
    q = mx.fast.rope(q, ...)              Heads, with a norm and a rotation
    o = scaled_dot_product_attention(q, k, v)          Attended: one launch (FusedLayerCache)
    o = o.transpose(0, 2, 1, 3).reshape(N, 1, -1)      its rows

A rotation may scale its input (Scaled).  DeepSeek's models split heads and rows (Slice, Latents).
"""

from dataclasses import dataclass
from typing import Any

from vllm_metal_lite.attention.base import AttentionCall
from vllm_metal_lite.attention.paged.step import KernelStepAttention
from vllm_metal_lite.attention.pending_heads import Heads, Latents
from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.context import fusion_context
from vllm_metal_lite.fusion.traced import Traced, as_view, origin_of, rows_of
from vllm_metal_lite.kernels.arguments import Columns, RMSNorm, Rope
from vllm_metal_lite.kernels.rope_write import NewRows
from vllm_metal_lite.model.seam.hooks import ScalingAt
from vllm_metal_lite.model.seam.layer_cache import KVHandle, PagedLayerCache


class Slice(Columns):
    """Columns of an array that `mx.split` cut; latents, if a norm follows."""

    __slots__ = ()

    def normed(self, norm: RMSNorm) -> Latents | None:
        return None if norm.weight is None else Latents(self, norm.weight.size, norm)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Heads whose first `dims` elements were multiplied by a number."""

    heads: Heads
    factor: float
    dims: int


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention output in its memory layout: rows (N, num_heads, head_dim)."""

    rows: mx.array


def heads_of(x: mx.array) -> Heads:
    """The origin of x (N, num_heads, 1, head_dim), or x itself if the origin is unknown."""
    origin = origin_of(x)
    if isinstance(origin, Heads):
        return origin
    rows, heads, _, dim = x.shape
    return Heads(Columns(x.reshape(rows, heads * dim), 0), heads, dim)


# Rules


def make_heads(value: mx.array, x: Traced, *_: Any, **__: Any) -> mx.array:
    """x: the columns of one projection in a joined product, or a whole product."""
    columns, rows = x.origin, x.rows
    if value.ndim != 4 or value.shape[:2] != (len(x), 1):
        return value
    if not isinstance(columns, Columns):
        if rows is None or x.ndim != 3 or len(rows) != len(x):
            return value
        columns = Columns(rows, 0, x.origin)
    return Traced(value, Heads(columns, value.shape[2], value.shape[3]))


def merge_heads(value: mx.array, x: Traced, *_: Any, **__: Any) -> mx.array:
    if value.shape[:-1] != (len(x), 1):
        return value
    return as_view(x.origin.rows.reshape(len(x), -1), value.shape[:-1])


# The arguments by which `transpose`, `swapaxes` and `expand_dims` move or make an axis of length 1.
_MOVES = (0, 2, 1, 3), ((0, 2, 1, 3),), (1, 2), (2, 1), (1,)


def keep_layout(value: mx.array, x: Traced, *axes: Any, **axis: Any) -> mx.array:
    """The memory layout stays, so the origin does."""
    return Traced(value, x.origin) if (*axes, *axis.values()) in _MOVES else value


def split_columns(
    parts: list[mx.array], x: mx.array, indices_or_sections: Any, axis: int = 0, **_: Any
) -> list[mx.array]:
    """The parts of packed rows (N, 1, K), or of heads (N, H, 1, D), get their columns as
    origins."""
    at_indices = isinstance(indices_or_sections, list | tuple) and axis in (-1, x.ndim - 1)
    # Parts for recurrent layers know their columns already.
    if not at_indices or any(type(part) is not mx.array for part in parts):
        return parts
    starts = 0, *(index % x.shape[-1] for index in indices_or_sections)  # they may be negative
    pairs = list(zip(parts, starts, strict=True))
    if x.ndim == 3 and x.shape[1] == 1:
        known = origin_of(x)
        whole = known if isinstance(known, Columns) else Columns(rows_of(x), 0)
        return [Traced(part, Slice(whole.array, whole.start + start)) for part, start in pairs]
    if x.ndim != 4 or x.shape[2] != 1:
        return parts
    heads = heads_of(x)
    if heads.norm or heads.rope:
        return parts
    array, first = heads.columns.array, heads.columns.start
    count, stride = heads.num_heads, heads.stride or heads.head_dim
    return [
        Traced(part, Heads(Columns(array, first + start), count, part.shape[-1], stride=stride))
        for part, start in pairs
    ]


def norm_heads(
    value: mx.array, x: Traced, weight: mx.array | None, eps: float, **_: Any
) -> mx.array:
    origin = x.origin.normed(RMSNorm(weight, eps))
    return value if origin is None else Traced(value, origin)


def scale_heads(value: mx.array, x: Traced, factor: Any) -> mx.array:
    whole = isinstance(factor, float)
    return Traced(value, Scaled(x.origin, factor, x.origin.head_dim)) if whole else value


def scale_heads_at(at: Any, x: Traced) -> ScalingAt:
    """x.at[..., :dims].multiply(factor)"""
    heads = x.origin

    def noted(value: mx.array, dims: int, factor: float) -> mx.array:
        return Traced(value, Scaled(heads, factor, dims))

    return ScalingAt(x, at, noted)


def rotate_heads(value: mx.array, x: mx.array, dims: int, **how: Any) -> mx.array:
    step = fusion_context().step
    if step is None or how["offset"] is not step.positions or x.ndim != 4 or x.shape[2] != 1:
        return value
    if step.pictures is not None and step.pictures.axes is not None:
        return value  # by three positions
    scaled = origin_of(x)
    if isinstance(scaled, Scaled) and scaled.dims == dims:
        heads, factor = scaled.heads, scaled.factor
    else:
        heads, factor = heads_of(x), 1.0
    angles = how["traditional"], how["base"], how["scale"], how.get("freqs")
    rotated = heads.rotated(Rope(dims, *angles, factor))
    return value if rotated is None else Traced(value, rotated)


class FusedLayerCache(PagedLayerCache):
    """Holds new K and V rows until the queries arrive, so that one launch serves both."""

    attention: KernelStepAttention
    _pending: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[KVHandle, KVHandle]:
        self.end()
        if not isinstance(origin_of(k), Heads | Latents):
            return super().update_and_fetch(k, v)
        self._pending = k, v
        return self.keys_and_values()

    def end(self) -> None:
        """Write the pending rows."""
        if self._pending is not None:
            (k, v), self._pending = self._pending, None
            super().update_and_fetch(k, v)

    def _attend(self, q: mx.array, call: AttentionCall) -> mx.array:
        rows: mx.array | NewRows | None = self._with_new_rows(q)
        if rows is None:
            self.end()
            rows = q.squeeze(2)
        out = self.attention.attend(rows, call)
        return Traced(out[:, :, None], Attended(out))

    def _rotary_queries(self, scaled: mx.array, scale: float) -> mx.array:
        """The queries, in one launch with the pending latents if the kernel takes these."""
        origin = origin_of(scaled)
        if self._pending is not None and isinstance(origin, Scaled):
            by_scale = (origin.factor, origin.dims) == (scale, origin.heads.head_dim)
            latents, k_pe = map(origin_of, self._pending)
            if by_scale and isinstance(latents, Latents) and isinstance(k_pe, Heads):
                rows = self.attention.latent_write(self.layer, origin.heads, latents, k_pe)
                if rows is not None:
                    self._pending = None
                    return rows
        return super()._rotary_queries(scaled, scale)

    def _with_new_rows(self, q: mx.array) -> mx.array | NewRows | None:
        """The queries, if one launch takes them with the pending rows; otherwise None."""
        if self._pending is None:
            return None
        k, v = self._pending
        of_q, of_k = origin_of(q), origin_of(k)
        if not isinstance(of_q, Heads) or not isinstance(of_k, Heads):
            return None
        rows = self.attention.rope_write(self.layer, of_q, of_k, heads_of(v))
        if rows is not None:
            self._pending = None
        return rows
