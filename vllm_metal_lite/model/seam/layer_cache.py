"""The seam: runs packed tokens through an unmodified mlx-lm model over the paged store.

Tokens enter as a batch of N sequences of length 1, so `mx.fast.rope` takes one offset per row and
each request keeps its own positions.  Each layer gets a `PagedLayerCache`, which returns handles
for K and V.  `mx.fast.scaled_dot_product_attention` with a handle for keys calls our attention
(seam/hooks.py).

The handles represent arrays that a packed forward does not make: K and V, latent scores.  They are
empty arrays of an absurd width, so that an unforeseen use fails and computes no wrong result.
"""

from typing import Any

from vllm_metal_lite.attention.base import AttentionCall, StepAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.model.seam.kv_segments import rebuild
from vllm_metal_lite.model.seam.sequences import PackedCache, SequenceStep
from vllm_metal_lite.recurrence.sequence_batches import SequenceBatch

# An array of this shape fails if a module computes with it.
POISON_SHAPE = (0, 7919)


class Handle(mx.array):
    """Represents an array of the layer that owns `cache`."""

    def __init__(self, cache: "PagedLayerCache") -> None:
        super().__init__(mx.zeros(POISON_SHAPE, cache.spec.dtype))
        self.cache = cache


class KVHandle(Handle):
    """One layer's K or V in the store.

    shape: as in mlx-lm, except for the length: (N,), one per row.
    """

    @property
    def shape(self) -> tuple:
        spec, step = self.cache.spec, self.cache.step
        return (step.num_rows, spec.num_kv_heads, step.positions + 1, spec.k_head_dim)

    def astype(self, dtype: mx.Dtype, stream: object = None) -> "KVHandle":
        """Returns self: SDPA computes in the wider type of queries and keys anyway."""
        return self


class ValueHandle(KVHandle):
    """One layer's V.

    Latent attention (MLA: DeepSeek V3, Kimi, GLM 4.7 Flash, LongCat, ...) keeps one latent and one
    rotary key per token, as K and V of a single head.  For sequences of length 1, such as packed
    rows, mlx-lm absorbs the up-projections into queries and outputs:
    scores = q @ latent + q_pe @ k_pe, and values are the latents.  mlx-lm passes the second
    product to SDPA as `mask`.
    """

    def swapaxes(self, axis1: int, axis2: int, *, stream: object = None) -> "RotaryKeys":
        if {axis1 % 4, axis2 % 4} != {2, 3}:
            raise NotImplementedError("values with their heads or batch transposed")
        return RotaryKeys(self.cache)


class RotaryKeys(Handle):
    """Represents k_pe, transposed.  The rotary keys are in the store where V would be."""

    def __rmatmul__(self, q_pe: mx.array) -> "LatentScores":
        return LatentScores(self.cache, q_pe)


class LatentScores(Handle):
    """Represents q_pe @ k_pe, which our attention computes.  q_pe: (N, H, 1, rope_dim)."""

    def __init__(self, cache: "PagedLayerCache", q_pe: mx.array) -> None:
        super().__init__(cache)
        self.q_pe = q_pe


class Mask:
    """Represents a layer's mask: records how far back a query sees.

    For modules that see sequences, `native` gets mlx-lm's own mask for the length of a batch.
    """

    def __init__(self, cache: "PagedLayerCache", return_array: bool, window: int | None) -> None:
        self._cache, self._return_array, self.window = cache, return_array, window

    def native(self, seqs: SequenceBatch) -> Any:
        cache = self._cache.native(seqs)
        return cache.make_mask(
            seqs.length, return_array=self._return_array, window_size=self.window
        )


class PagedLayerCache(PackedCache):
    """The cache of one attention layer during one forward.

    offset: (N,) positions of the rows, as `mx.fast.rope` takes them.
    template: mlx-lm's own empty cache.  sequences: the step as sequences, for modules that must see
    these (sequences.py); None if there are no such modules.
    """

    def __init__(
        self,
        layer: int,
        attention: StepAttention,
        template: Any = None,
        sequences: SequenceStep | None = None,
    ) -> None:
        self.layer, self.spec = layer, attention.store.specs[layer]
        self.attention, self.step = attention, attention.step
        self.template, self.sequences = template, sequences
        self.offset = attention.step.positions
        self._written: list[tuple[mx.array, mx.array]] = []

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[KVHandle, KVHandle]:
        """Write this step's rows, k and v (N, num_kv_heads, 1, head_dim); returns the handles."""
        self.attention.write(self.layer, k.squeeze(2), v.squeeze(2))
        return self.keys_and_values()

    def end(self) -> None:
        """Called after the model has built its last layer."""

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        """The handles, for a later layer that shares this one's K and V."""
        return KVHandle(self), ValueHandle(self)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> Mask | None:
        """Answer mlx-lm, which asks for a mask.  Our attention knows positions, so the mask only
        records the window.

        None: the layer has no other window than its own, and no module needs a mask per sequence.
        """
        alone = self.sequences is not None and self.sequences.alone
        if not alone and window_size in (None, self.spec.window):
            return None
        return Mask(self, return_array, window_size)

    def attend(
        self,
        q: mx.array,
        scale: float,
        mask: Mask | LatentScores | None = None,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attention of q (N, H, 1, D) to the store; returns (N, H, 1, v_head_dim).

        With LatentScores as the mask, K holds latents, which are also the values.
        """
        window, chunk, q_pe = self.spec.window, self.spec.attention_chunk, None
        if isinstance(mask, Mask):
            # The store keeps nothing beyond the layer's own window, whatever the mask asks for.
            window = min((w for w in (mask.window, window) if w is not None), default=None)
        elif isinstance(mask, LatentScores) and mask.cache is self:
            q_pe = self._rotary_queries(mask.q_pe, scale)
        elif mask is not None:
            raise NotImplementedError(f"an attention mask of its own ({type(mask).__name__})")
        scores = Scores(scale, window, softcap, sinks)
        return self._attend(q, AttentionCall(self.layer, scores, q_pe, chunk))

    def _rotary_queries(self, scaled: mx.array, scale: float) -> mx.array:
        """(N, H, rope_dim) of q_pe * scale, as LatentScores have them."""
        return scaled.squeeze(2) / scale

    def _attend(self, q: mx.array, call: AttentionCall) -> mx.array:
        return self.attention.attend(q.squeeze(2), call)[:, :, None]

    # For modules that see sequences

    def native(self, seqs: SequenceBatch) -> Any:
        if not self.steps.alone:
            raise NotImplementedError("a module that keeps K and V keeps a state too")
        store, earlier = self.attention.store, self._written
        return rebuild(self.template, self.layer, store, self.steps, seqs, earlier)

    def keep(self, seqs: SequenceBatch, native: Any) -> None:
        if native.written is not None:
            self._written.append(native.written)

    def flush(self, out: Any) -> None:
        if not self._written:
            return
        k, v = (
            self.steps.rows.pack([a[0].swapaxes(0, 1) for a in rows])
            for rows in zip(*self._written, strict=True)
        )
        # Read the store before the write; otherwise MLX would copy the store.
        self.attention.write(self.layer, mx.depends(k, out), mx.depends(v, out))
        self._written = []
