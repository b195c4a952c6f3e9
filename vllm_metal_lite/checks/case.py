"""Random sequences in a paged store, for checks against the reference and for timing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from vllm_metal_lite.attention.base import AttentionCall
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.pending_heads import Heads
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.batch.pictures import NO_FEATURE, PictureRows
from vllm_metal_lite.checks.values import draw
from vllm_metal_lite.kernels.arguments import Scores
from vllm_metal_lite.kernels.registry import Prefill
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.specs import AttentionShape

# ROWS contexts: of one key, within a block, over many blocks, and of more than one split.
CONTEXTS = np.array((1, 7, 16, 33, 65, 130, 270, 300, 540))
# Rows of each sequence in the prompt check: whole prompts, and chunks after a context.
_PROMPT_ROWS = np.array((1, 7, 9, 3, 20, 1, 2, 5, 40))

# Heads of new queries, keys and values.
NewHeads = tuple[Heads, Heads, Heads]


class Sequences:
    """Sequences of `contexts` tokens, whose blocks are in random order.

    prefix: the tokens that all sequences share, in whole blocks.  spare: the number of blocks that
    no sequence has.
    """

    def __init__(
        self,
        contexts: Sequence[int] | np.ndarray,
        block_size: int,
        rng: np.random.Generator,
        prefix: int = 0,
        spare: int = 0,
    ) -> None:
        self._contexts = np.array(contexts)
        self._inputs = InputBatch(len(contexts), max(contexts), block_size)
        self._rows = np.array([self._inputs.add([0] * n, n) for n in contexts])
        shared = prefix // block_size
        own = -(-self._contexts // block_size) - shared
        self.num_blocks = shared + int(own.sum()) + spare
        free = rng.permutation(self.num_blocks).tolist()
        first = [free.pop() for _ in range(shared)]
        for row, count in zip(self._rows, own, strict=True):
            self._inputs.append_blocks(row, first + [free.pop() for _ in range(count)])

    def batch(self, lengths: np.ndarray) -> ForwardBatch:
        """A batch of the last rows of each sequence.  lengths: how many rows of each."""
        return self._inputs.pack(self._rows, self._contexts - lengths, lengths)


class Case:
    """Sequences in a store with blocks in random order, and queries.

    decodes: a batch of the last row of each sequence.  prompts: a batch of the last rows of each
    sequence, in different numbers.  seeing: `prompts` with pictures.
    owned: the slots of all rows, sorted.  drawn: K and V, (slots, num_kv_heads, head_dim) float32,
    before the store rounds them.  keys, values: K and V after that; NaN in free slots.  stored:
    keys and values in the format of the store.
    q: the queries (rows, num_heads, k_head_dim) of `prompts`; their first rows are also those of
    `decodes`.
    q_pe: the same, (rows, num_heads, v_head_dim), for latents.
    A caller that changes an array copies it first.
    """

    def __init__(self, shape: AttentionShape, block_size: int) -> None:
        self.shape, self.block_size = shape, block_size
        rng = np.random.default_rng(0)
        sequences = Sequences(CONTEXTS, block_size, rng, spare=4)
        self.num_blocks = sequences.num_blocks
        self.decodes = sequences.batch(np.ones_like(CONTEXTS))
        self.prompts = sequences.batch(_PROMPT_ROWS)
        self.seeing = _with_spans(self.prompts)
        slots = (self.num_blocks + 1) * block_size
        self.owned = np.sort(sequences.batch(CONTEXTS).slot_mapping())
        self.spec = spec_of(shape)
        self.formats = self.spec.k_row, self.spec.v_row
        self.drawn = [
            draw(rng, (slots, shape.num_kv_heads, row.dim), shape.dtype) for row in self.formats
        ]
        self.stored, (self.keys, self.values) = self._fill()
        heads = self.prompts.num_tokens, shape.num_heads
        self.q = draw(rng, (*heads, shape.k_head_dim), shape.dtype)
        # Rotary parts of queries, whose latents are keys and values.
        self.q_pe = draw(rng, (*heads, shape.v_head_dim), shape.dtype) if shape.latent else None
        self.sinks = 2 * draw(rng, (shape.num_heads,), shape.dtype) if shape.sinks else None

    def _fill(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The store's K and V, made on this machine's CPU, and their float32 values.

        Free slots are NaN.  In a quantised store all their bits are ones, so the scales are NaN.
        """
        stored, values = [], []
        free = np.ones(len(self.drawn[0]), bool)
        free[self.owned] = False
        for row, drawn in zip(self.formats, self.drawn, strict=True):
            with mx.stream(mx.cpu):
                packed = row.pack(mx.array(drawn))
                values.append(np.array(row.unpack(packed).astype(mx.float32)))
                stored.append(np.array(packed if row.bits else packed.astype(mx.float32)))
            values[-1][free] = np.nan
            stored[-1][free] = 0xFFFFFFFF if row.bits else np.nan
        return stored, values

    def array(self, values: np.ndarray) -> mx.array:
        return mx.array(values.astype(np.float32)).astype(self.shape.dtype)

    def store(self) -> LayerStore:
        """A new store, for kernels that may write to it."""
        rows = zip(self.formats, self.stored, strict=True)
        keys, values = (mx.array(stored).astype(row.kept_dtype) for row, stored in rows)
        mx.eval(keys, values)
        return LayerStore(keys, values, new_ticket(), self.spec, self.block_size)

    def scores(self) -> Scores:
        sinks = None if self.sinks is None else mx.array(self.sinks)
        return Scores(self.shape.k_head_dim**-0.5, self.shape.window, self.shape.softcap, sinks)

    def sharing(self, num_rows: int) -> tuple[ForwardBatch, np.ndarray]:
        """The decodes, where the num_rows longest begin with the same blocks; and the length of
        each row's prefix."""
        first = len(CONTEXTS) - num_rows
        shared = (int(CONTEXTS[first]) - 1) // self.block_size
        tables = self.decodes.block_tables.copy()
        tables[:, first:, :shared] = tables[:, -1:, :shared]
        lens = np.zeros(len(CONTEXTS), np.int32)
        lens[first:] = shared * self.block_size
        return replace(self.decodes, block_tables=tables), lens

    def expected(
        self, batch: ForwardBatch, q: np.ndarray, keys: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        """Attention of q to keys and values by the reference, in float32 on this machine's CPU."""
        with mx.stream(mx.cpu):
            spec = replace(self.spec, dtype=mx.float32, bits=None)
            store = PagedStore([spec], self.num_blocks, self.block_size)
            store.keys, store.values = [mx.array(keys)], [mx.array(values)]
            attention = ReferenceAttention(store)
            step = attention.prepare(batch, batch.num_tokens)
            q_pe = None if self.q_pe is None else mx.array(self.q_pe[: len(q)])
            call = AttentionCall(0, self.scores(), q_pe)
            bound = attention.begin(step, attention.new_state())
            return np.array(bound.attend(mx.array(q.astype(np.float32)), call))


def _with_spans(batch: ForwardBatch) -> ForwardBatch:
    """The batch with two pictures in each segment of six or more rows, each after a row of text.
    Rows of one picture see each other."""
    spans = np.stack([batch.positions, batch.positions + 1], axis=1)
    for first, end in pairwise(batch.cu_seqlens_q.tolist()):
        length = (end - first) // 3
        for start in (first + 1, first + length + 2) if length > 1 else ():
            spans[start : start + length] = spans[start, 0], spans[start + length - 1, 1]
    rows = np.full(batch.num_tokens, NO_FEATURE, np.int32)
    return replace(batch, pictures=PictureRows(rows, None, spans=spans))


class TimedStore:
    """Attention as serving calls it, to a store of `sequences` of `context` tokens each.

    rows: how many last rows of each sequence are computed.  prefix: the tokens that all sequences
    share, in whole blocks.
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
        # The rotary parts of the queries, which attend to latents.
        rotary = (self.batch.num_tokens, shape.num_heads, shape.v_head_dim)
        self.q_pe = mx.random.normal(rotary).astype(shape.dtype) if shape.latent else None
        mx.eval(store.arrays, self.q_pe)

    def queries(self) -> mx.array:
        q = mx.random.normal((self.batch.num_tokens, self.shape.num_heads, self.shape.k_head_dim))
        q = q.astype(self.shape.dtype)
        mx.eval(q)
        return q

    def attention(
        self, prefill: Prefill = "gather", without: str | None = None
    ) -> Callable[[mx.array | NewHeads], mx.array]:
        """A function that computes attention of queries; or of new rows, which it also writes.

        prefill: the path of prompts.  without: a kernel that is replaced.
        """
        s, failed = self.shape, () if without is None else (without,)
        attention = KernelAttention(self.store, prefill, [s], failed_kernels=failed)
        step, state = attention.prepare(self.batch, self.batch.num_tokens), attention.new_state()
        sinks = mx.zeros(s.num_heads) if s.sinks else None
        call = AttentionCall(0, Scores(self.scale, s.window, s.softcap, sinks), self.q_pe)

        def attend(q: mx.array | NewHeads) -> mx.array:
            bound = attention.begin(step, state)
            rows = bound.rope_write(0, *q) if isinstance(q, tuple) else q
            assert rows is not None
            return bound.attend(rows, call)

        return attend


def spec_of(shape: AttentionShape) -> LayerSpec:
    """The layer of a store that a shape attends to."""
    sizes = shape.num_kv_heads, shape.k_head_dim, shape.v_head_dim
    return LayerSpec(*sizes, shape.dtype, shape.window, bits=shape.kv_bits)


def rows_only(shape: AttentionShape) -> AttentionShape:
    """The fields that affect stored rows; masks do not."""
    heads, dims = (shape.num_heads, shape.num_kv_heads), (shape.k_head_dim, shape.v_head_dim)
    return AttentionShape(*heads, *dims, shape.dtype, kv_bits=shape.kv_bits)


def heads_only(shape: AttentionShape) -> AttentionShape:
    """The fields that affect queries; masks and the format of the store do not."""
    return replace(rows_only(shape), kv_bits=None)


@lru_cache(maxsize=2)  # the checks of one shape follow each other
def case_of(shape: AttentionShape, block_size: int) -> Case:
    return Case(shape, block_size)
