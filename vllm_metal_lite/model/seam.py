"""The seam: packed tokens through an unmodified mlx-lm model, K and V through the paged store.

Tokens enter as a batch of N sequences of length 1, so `mx.fast.rope` takes one offset a row and
RoPE restarts for every request.  Each layer gets a `PagedLayerCache`; what it returns for K and V
are `KVHandle`s, which stand for the store: `mx.fast.scaled_dot_product_attention` goes to our
attention when its keys are one.  The hook is in place only while a forward is being built.  Any
other use of a handle fails, because its array is empty and of an absurd width.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn

from vllm_metal_lite.attention.step import Attention, StepMetadata
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kv.store import LayerSpec

_POISON_SHAPE = (0, 7919)
_HOOK_LOCK = threading.Lock()


class KVHandle(mx.array):
    """Stands for one layer's K or V in the store, where a model expects the array itself."""

    def __init__(self, cache: "PagedLayerCache") -> None:
        super().__init__(mx.zeros(_POISON_SHAPE))
        self.cache = cache


class WindowMask:
    """What a layer's mask says, without the mask: how far back a query sees."""

    def __init__(self, window: int | None) -> None:
        self.window = window


class PagedLayerCache:
    """What one attention layer sees as its cache during one forward.

    offset: (N,) positions of the rows, which is what `mx.fast.rope` wants.
    """

    def __init__(
        self, layer: int, spec: LayerSpec, attention: Attention, step: StepMetadata
    ) -> None:
        self.layer, self.spec = layer, spec
        self.attention, self.step = attention, step
        self.offset = step.positions

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[KVHandle, KVHandle]:
        """Write this step's rows, k and v (N, num_kv_heads, 1, head_dim); returns the handles."""
        self.attention.write(self.layer, k.squeeze(2), v.squeeze(2), self.step)
        return KVHandle(self), KVHandle(self)

    def make_mask(
        self, num_tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> WindowMask:
        """mlx-lm's mask request; positions are ours to mind, so only the window is kept."""
        return WindowMask(window_size or self.spec.window)

    def attend(
        self,
        q: mx.array,
        scale: float,
        mask: WindowMask | None = None,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """q (N, H, 1, D) against the store -> (N, H, 1, v_head_dim)."""
        if not (mask is None or isinstance(mask, WindowMask)):
            raise NotImplementedError(f"an attention mask of its own ({type(mask).__name__})")
        out = self.attention.attend(
            self.layer,
            q.squeeze(2),
            self.step,
            scale=scale,
            window=self.spec.window if mask is None else mask.window,
            softcap=softcap,
            sinks=sinks,
        )
        return out[:, :, None]


@contextmanager
def sdpa_hook() -> Iterator[None]:
    """While open, SDPA with a KVHandle for keys is paged attention; any other call is MLX's own.

    One thread at a time: the name is the whole process's.
    """
    with _HOOK_LOCK:
        original = mx.fast.scaled_dot_product_attention

        def hooked(q, k, v, *, scale, mask=None, sinks=None, **kwargs):
            if not isinstance(k, KVHandle):
                return original(q, k, v, scale=scale, mask=mask, sinks=sinks, **kwargs)
            return k.cache.attend(q, scale, mask, sinks)

        mx.fast.scaled_dot_product_attention = hooked
        try:
            yield
        finally:
            mx.fast.scaled_dot_product_attention = original


class _Rows:
    """The rows that the body of a model hands to its head during a packed forward."""

    wanted: mx.array | None = None
    taken = False


def _select_rows(body: nn.Module, rows: _Rows) -> None:
    """Make `body`, which owns the decoder layers, hand only the wanted rows to the head."""
    base = type(body)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        h = base.__call__(self, *args, **kwargs)
        if rows.wanted is not None and isinstance(h, mx.array) and h.ndim == 3:
            rows.taken = True
            h = h[rows.wanted]
        return h

    body.__class__ = type(base.__name__, (base,), {"__call__": call})


def _body(model: nn.Module) -> nn.Module | None:
    """The module below `model` that owns the list of decoder layers."""
    for _, module in model.named_modules():
        if module is not model and isinstance(module.get("layers"), list):
            return module
    return None


class PackedModel:
    """An mlx-lm model that takes a packed step."""

    def __init__(self, model: nn.Module, specs: list[LayerSpec | None]) -> None:
        self.model, self.specs = model, specs
        self._rows = _Rows()
        body = _body(model)
        if body is not None:
            _select_rows(body, self._rows)

    @property
    def attention_specs(self) -> list[LayerSpec]:
        """The layers that keep something, in order: the store's layers."""
        return [s for s in self.specs if s is not None]

    def __call__(
        self, step: StepMetadata, attention: Attention, logits_indices: mx.array
    ) -> mx.array:
        """Build the forward of a step; returns logits (R, vocab_size) of the rows asked for."""
        caches, layer = [], 0
        for spec in self.specs:
            caches.append(spec and PagedLayerCache(layer, spec, attention, step))
            layer += spec is not None
        self._rows.wanted, self._rows.taken = logits_indices, False
        try:
            with sdpa_hook():
                logits = self.model(step.token_ids[:, None], cache=caches)
        finally:
            self._rows.wanted = None
        if not self._rows.taken:
            logits = logits[logits_indices]
        return logits.squeeze(1)
