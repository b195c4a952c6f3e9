"""A layer cache for fused kernels: one launch normalises, rotates, writes, and may attend."""

from vllm_metal_lite.attention.base import AttentionCall
from vllm_metal_lite.attention.paged.step import KernelStepAttention
from vllm_metal_lite.attention.pending_heads import Heads, Latents
from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion.heads import Attended, Scaled, heads_of
from vllm_metal_lite.fusion.traced import Traced, origin_of
from vllm_metal_lite.kernels.new_rows import NewRows
from vllm_metal_lite.model.seam.layer_cache import KVHandle, PagedLayerCache


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
