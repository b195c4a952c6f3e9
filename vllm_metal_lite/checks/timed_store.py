"""Attention as serving calls it, to a store of a given size, ready to be timed."""

from collections.abc import Callable

import numpy as np

from vllm_metal_lite.attention.base import AttentionCall
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.pending_heads import Heads
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.case import Sequences, spec_of
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.specs import AttentionShape

# Heads of queries, keys and values.
NewHeads = tuple[Heads, Heads, Heads]


class TimedStore:
    """`sequences` of `context` tokens; the last `rows` of each are computed.

    prefix: tokens, in blocks that all sequences begin with.
    """

    def __init__(
        self,
        shape: AttentionShape,
        sequences: int,
        context: int,
        rows: int = 1,
        *,
        prefix: int = 0,
        block_size: int = 16,
    ) -> None:
        self.shape = shape
        made = Sequences([context] * sequences, block_size, np.random.default_rng(0), prefix=prefix)
        self.batch = made.batch(np.full(sequences, rows))
        spec = spec_of(shape)
        self.store = store = PagedStore([spec], made.num_blocks, block_size)
        formats = spec.k_row, spec.v_row
        for arrays, row in zip((store.keys, store.values), formats, strict=True):
            drawn = mx.random.normal((len(arrays[0]), shape.num_kv_heads, row.dim))
            arrays[0] = row.pack(drawn.astype(shape.dtype))
        self.scale = shape.k_head_dim**-0.5
        # Rotary parts of queries to latents.
        rotary = (self.batch.num_tokens, shape.num_heads, shape.v_head_dim)
        self.q_pe = mx.random.normal(rotary).astype(shape.dtype) if shape.latent else None
        mx.eval(store.arrays, self.q_pe)

    def queries(self) -> mx.array:
        q = mx.random.normal((self.batch.num_tokens, self.shape.num_heads, self.shape.k_head_dim))
        q = q.astype(self.shape.dtype)
        mx.eval(q)
        return q

    def attention(
        self, prefill: str = "gather", without: str | None = None
    ) -> Callable[[mx.array | NewHeads], mx.array]:
        """Attention of queries, or of the heads of new rows, which it writes too.

        prefill: the path of prompts.  without: a kernel that is replaced.
        """
        s, failed = self.shape, () if without is None else (without,)
        attention = KernelAttention(self.store, prefill, [s], failed_kernels=failed)
        step, state = attention.prepare(self.batch, self.batch.num_tokens), attention.new_state()
        sinks = mx.zeros(s.num_heads) if s.sinks else None
        call = AttentionCall(0, self.scale, s.window, s.softcap, sinks, self.q_pe)

        def attend(q: mx.array | NewHeads) -> mx.array:
            bound = attention.begin(step, state)
            rows = bound.rope_write(0, *q) if isinstance(q, tuple) else q
            assert rows is not None
            return bound.attend(rows, call)

        return attend
