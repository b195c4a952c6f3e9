"""Attention and K/V writes through the kernels of metal/, on Metal and CUDA.

Decode rows go through `paged_decode`, which reads the store in place; a long prefix that they share
is read once for all of them, by `shared_prefix` (see shared.py).  Prompts, whole or in chunks,
go through `varlen_prefill`, which reads the store in place too, or through MLX's SDPA on what
`kv_gather` copies out of the store, cut into calls as the reference does: whichever is faster on
the device (see choose.py), and in small steps in shapes that repeat (see prompts.py).  In still
smaller ones each of their rows is a decode.
"""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from mlx.utils import tree_flatten

from vllm_metal_lite.attention.base import StepMetadata, pad_rows
from vllm_metal_lite.attention.heads import Heads
from vllm_metal_lite.attention.paged import common_prefix as shared
from vllm_metal_lite.attention.paged.common_prefix import CommonPrefix, PrefixSearch
from vllm_metal_lite.attention.paged.prompts import (
    SMALL_ROWS,
    SdpaPrompts,
    VarlenPrompts,
    pad_tables,
)
from vllm_metal_lite.attention.sdpa.attention import ReferenceAttention
from vllm_metal_lite.attention.sdpa.calls import SdpaCalls
from vllm_metal_lite.attention.sdpa.plan import power_of_two
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.kernels import ops
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.new_rows import NewRows
from vllm_metal_lite.kernels.rope_write import rope_write, unsupported
from vllm_metal_lite.kernels.shared_prefix import prefix_splits, shared_prefix
from vllm_metal_lite.kernels.varlen_prefill import varlen_prefill
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.specs import AttentionShape

PREFILLS = ("varlen", "gather")

# Most rows of a step in which prompts are decodes too, a row each: they wait for launches more than
# for keys that are read by several rows.
ROWS_AS_DECODES = 64
# Most keys that its rows of prompts may read, each for itself, beside the prefix that they share.
_MAX_OWN_KEYS = 1 << 14


class KernelStep(StepMetadata):
    """A step whose first num_decodes rows are decodes, and the rest prompts.

    decodes: the batch as its decodes are attended to, which may be all rows of the step.
    block_tables (num_decodes, W), one a KV group, and seq_lens (num_decodes,) int32 are of the
    decodes; in a step of nothing else they cover the padded rows too, with a seq_len of 0.
    plans: the `decode_plan` of layers by their number of KV heads.
    prompts: None in a step of nothing but decodes.
    writes_late: attention may write the step's rows, for no row sees another one of them.
    prefix_len: the largest power of two within the prefix that decodes share, 0 = they share none.
    leader (1,), prefix_lens (num_decodes,): the CommonPrefix, or None.  own_plans: as plans, of
    what is behind it.
    """

    arrays = (
        *StepMetadata.arrays, "block_tables", "seq_lens", "leader", "prefix_lens", "prompt_arrays"
    )  # fmt: skip

    def __init__(
        self,
        batch: ForwardBatch,
        num_rows: int,
        decodes: ForwardBatch,
        prompts: VarlenPrompts | SdpaPrompts | None,
        prefix: CommonPrefix | None,
        kv_heads: Collection[int],
    ) -> None:
        count = decodes.num_decodes
        self.num_decodes = count if prompts else num_rows
        repeats = prompts is None or prompts.repeats
        num_logits = 1
        if repeats:  # a row a segment, whether it ends or not; more where prompts are scored
            num_logits = power_of_two(batch.num_segments)
            if prompts:
                num_logits = count + power_of_two(batch.num_segments - count)
            if len(batch.logits_indices) > num_logits:
                num_logits = power_of_two(len(batch.logits_indices))
        super().__init__(batch, num_rows, num_logits=num_logits)
        self.prompts = prompts
        self.block_tables, self.seq_lens, self.plans = [], None, {}
        self.prefix_len, self.leader, self.prefix_lens, self.own_plans = 0, None, None, {}
        if count:
            seq_lens = decodes.seq_lens[:count]
            longest = int(seq_lens.max())
            width = power_of_two(-(-longest // batch.block_size))
            tables = [b.block_tables[:count] for b in decodes.by_group]
            self.block_tables = [pad_tables(t, self.num_decodes, width) for t in tables]
            self.seq_lens = pad_rows(seq_lens, self.num_decodes)
            self.plans = {h: ops.decode_plan(self.num_decodes, h, longest) for h in kv_heads}
        self.writes_late = prompts is None and decodes is batch and not batch.reads_new_rows
        if prefix:
            own = int((seq_lens - prefix.lens).max())
            self.own_plans = {h: ops.decode_plan(self.num_decodes, h, own) for h in kv_heads}
            self.prefix_len = 1 << (int(prefix.lens.max()).bit_length() - 1)
            self.leader = np.array([prefix.leader], np.int32)
            self.prefix_lens = pad_rows(prefix.lens, self.num_decodes)
        if repeats:
            arrays = tree_flatten([getattr(self, name) for name in self.arrays])
            shapes = [None if a is None else a.shape for _, a in arrays]
            plans = *self.plans.values(), *self.own_plans.values()
            self.variant = (self.num_decodes, self.writes_late, self.prefix_len, *plans, *shapes)

    @property
    def prompt_arrays(self) -> list[Any] | None:
        return self.prompts and self.prompts.arrays

    @prompt_arrays.setter
    def prompt_arrays(self, arrays: list[Any] | None) -> None:
        self.prompts = self.prompts and self.prompts.with_arrays(arrays)


class KernelAttention(ReferenceAttention):
    """The store is written and read by kernels only; a token keeps them in order.

    prefill: "varlen" or "gather", how prompts attend.  groups: query heads a KV head, of all
    layers, without which steps with prompts by "varlen" are not compiled.  shares: `shared_prefix`
    may be used.  skinny_rows: products of so many rows go through `skinny_gemm`.
    rows_as_decodes: in steps of up to so many rows, rows of prompts may be attended to as decodes.
    """

    name = "kernels"
    overlaps = True

    def __init__(
        self,
        store: PagedStore,
        prefill: str,
        fuses: bool = True,
        groups: Collection[int] = (),
        shares: bool = True,
        skinny_rows: range = range(0),
        rows_as_decodes: int = 0,
    ) -> None:
        super().__init__(store)
        self.prefill, self.fuses, self._groups = prefill, fuses, sorted(groups)
        self.skinny_rows, self.rows_as_decodes = skinny_rows, rows_as_decodes
        # Layers that see all of a prefix, in a form that matrices take.
        self._shares = [
            shares and spec.window is None and spec.bits is None
            and not ops.head_size_problem((spec.k_head_dim, spec.v_head_dim), ops.MAX_PREFILL_DIM)
            for spec in store.specs
        ]  # fmt: skip
        of_layers = zip(store.group_of, self._shares, strict=True)
        self._sharing_groups = sorted({group for group, shared in of_layers if shared})
        self._prefix_search = PrefixSearch()
        self.token = ops.new_token()
        self._kv_heads = sorted({keys.shape[1] for keys in store.keys})
        windows = [[] for _ in store.num_blocks]
        for spec, group in zip(store.specs, store.group_of, strict=True):
            windows[group].append(spec.window)
        self._windows = [None if None in w else max(w, default=None) for w in windows]

    @property
    def state(self) -> list[mx.array]:
        # One shape, whichever kernel was the last: a compiled step is compiled for shapes.
        return [self.token.reshape(-1)[:1]]

    @state.setter
    def state(self, state: list[mx.array]) -> None:
        (self.token,) = state

    def prepare(self, batch: ForwardBatch, num_rows: int) -> KernelStep:
        (decodes, prefix), prompts = self._decodes(batch, num_rows), None
        if decodes.num_decodes < decodes.num_segments:
            rest, rows = batch.prefills(), num_rows - batch.num_decodes
            repeats = batch.num_decodes > 0 and rows <= SMALL_ROWS
            if self.prefill == "varlen":
                prompts = VarlenPrompts(rest, rows, self._groups, repeats)
            else:
                prompts = SdpaPrompts(rest, rows, self._windows, repeats)
        step = KernelStep(batch, num_rows, decodes, prompts, prefix, self._kv_heads)
        return step.on_device()

    def _decodes(
        self, batch: ForwardBatch, num_rows: int
    ) -> tuple[ForwardBatch, CommonPrefix | None]:
        """A step as its decodes are attended to, and the prefix that they share.

        Rows of a chunk are as many decodes that share what is before it: so a small step needs no
        launches for its prompts, and the keys before a chunk are read in parts side by side.
        """
        if batch.num_decodes < batch.num_segments and num_rows <= self.rows_as_decodes:
            rows, first = batch.as_decodes(), batch.num_decodes
            prefix = self._common_prefix(rows, shared.MIN_SAVED_FOR_PROMPTS)
            own = rows.seq_lens - (prefix.lens if prefix else 0)
            if own[first:].sum() <= _MAX_OWN_KEYS:
                return rows, prefix
        return batch, self._common_prefix(batch, shared.MIN_SAVED_TOKENS)

    def _common_prefix(self, batch: ForwardBatch, min_saved: int) -> CommonPrefix | None:
        if not self._sharing_groups:
            return None
        decodes = slice(batch.num_decodes)
        tables = [batch.by_group[g].block_tables[decodes] for g in self._sharing_groups]
        seq_lens = batch.seq_lens[decodes]
        return self._prefix_search(tables, seq_lens, batch.block_size, min_saved)

    def write(self, layer: int, k: mx.array, v: mx.array, step: StepMetadata) -> None:
        spec, group = self.store.specs[layer], self.store.group_of[layer]
        rows = k.astype(spec.dtype), v.astype(spec.dtype)
        self.token = ops.kv_write(*rows, step.slot_mapping[group], *self._store(layer), spec)

    def rope_write(
        self, layer: int, q: Heads, k: Heads, v: Heads, step: StepMetadata
    ) -> mx.array | NewRows | None:
        """Norm and rotate q and k, write k and v -> q (num_rows, H, D), for `attend`, or what is
        left to it, if its kernel can do all of it.  None: not by a kernel."""
        if self.store.specs[layer].bits is not None:
            return None
        keys, values, _ = self._store(layer)
        kept = [(keys.shape[1], keys.shape[2]), (values.shape[1], values.shape[2])]
        if [(h.num_heads, h.head_dim) for h in (k, v)] != kept or q.head_dim != k.head_dim:
            return None
        if v.norm or v.rope or not q.turns_like(k) or not (k.rope or k.norm):
            return None
        columns = [h.columns for h in (q, k, v)]
        if any(c.array.dtype != keys.dtype for c in columns):
            return None
        shape = AttentionShape(q.num_heads, *kept[0], values.shape[2], keys.dtype)
        if unsupported(shape, k.rope) is not None:
            return None
        new = NewRows(*columns, q.num_heads, k.rope, q.norm, k.norm)
        if step.writes_late:
            return new
        slot_mapping = step.slot_mapping[self.store.group_of[layer]]
        rows, self.token = rope_write(
            new, positions=step.positions, slot_mapping=slot_mapping,
            keys=keys, values=values, token=self.token,
        )  # fmt: skip
        return rows

    def gather(self, layer: int, calls: SdpaCalls) -> Iterator[tuple[mx.array, mx.array]]:
        for slots, parts in calls.gathers:
            k, v, self.token = ops.kv_gather(slots, *self._store(layer), self.store.specs[layer])
            yield from zip(parts.cut(k), parts.cut(v), strict=True)

    def take(self, rows: mx.array, index: mx.array) -> mx.array:
        return gather_rows(rows, index) if self.fuses else rows[index]

    def attend(
        self,
        layer: int,
        q: mx.array | NewRows,
        step: KernelStep,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        how = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        in_place = {"block_size": self.store.block_size, **how}
        spec, group = self.store.specs[layer], self.store.group_of[layer]
        new = isinstance(q, NewRows)
        num_heads = q.num_heads if new else q.shape[1]
        rows, outputs = q if new else q.astype(spec.dtype), []
        if step.num_decodes:
            decodes = rows if new else rows[: step.num_decodes]
            plans, prefix = step.plans, None
            if step.prefix_len and self._shares[layer] and window is None:
                plans, heads = step.own_plans, (num_heads, spec.num_kv_heads)
                splits = prefix_splits(step.num_decodes, *heads, step.prefix_len)
                prefix = shared_prefix(
                    decodes, step.block_tables[group], step.seq_lens, step.leader,
                    step.prefix_lens, *self._store(layer), block_size=self.store.block_size,
                    scale=scale, softcap=softcap, splits=splits,
                )  # fmt: skip
                self.token = prefix.lse
            out, self.token = ops.paged_decode(
                decodes, step.block_tables[group], step.seq_lens, *self._store(layer),
                plan=plans[spec.num_kv_heads], spec=spec, prefix=prefix, **in_place,
            )  # fmt: skip
            outputs.append(out)
        prompts = step.prompts
        if isinstance(prompts, VarlenPrompts):
            out, self.token = varlen_prefill(
                rows[step.num_decodes :], *prompts.metadata(group),
                prompts.tiles(num_heads // spec.num_kv_heads), *self._store(layer), **in_place,
            )  # fmt: skip
            outputs.append(out)
        elif prompts:
            outputs.append(super().attend(layer, rows[step.num_decodes :], prompts, **how))
        out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return out if new else out.astype(q.dtype)

    def _store(self, layer: int) -> tuple[mx.array, mx.array, mx.array]:
        return self.store.keys[layer], self.store.values[layer], self.token
