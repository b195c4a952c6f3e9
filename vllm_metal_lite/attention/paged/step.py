"""One step through the kernels of metal/: its plan, its attention, and its K/V writes."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

from vllm_metal_lite.attention.base import AttentionCall, DeviceBatch
from vllm_metal_lite.attention.paged.decodes import Decodes
from vllm_metal_lite.attention.pending_heads import Heads, Latents, same_rope
from vllm_metal_lite.attention.sdpa.calls import SdpaPlan
from vllm_metal_lite.attention.sdpa.execute import attend_whole_prompt, execute_calls, take_rows
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.pictures import sees_spans
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.decode import paged_decode
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.latent_attention import decode_metadata, latent_attention
from vllm_metal_lite.kernels.latent_write import NewLatents, latent_write
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS
from vllm_metal_lite.kernels.prefill import VarlenMetadata, varlen_prefill
from vllm_metal_lite.kernels.rope_write import NewRows, rope_write
from vllm_metal_lite.kernels.shared_prefix import prefix_splits, shared_prefix
from vllm_metal_lite.kernels.store import LayerStore
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.recurrence.kernels import KernelRecurrence, SegmentPlan


class VarlenPrompts(NamedTuple):
    """The arrays that `varlen_prefill` or `latent_attention` reads.

    block_tables: (S, W) per KV group.  cu_seqlens_q: (S+1,).  seq_lens: (S,).

    S (at least MIN_ELEMENTS) and W are powers of two; padded segments have no rows.  tiles: query
    heads per KV head -> the tiles of such layers.  splits: (query heads, KV heads) -> the splits of
    each context in such layers.  repeats: see DeviceBatch.  spans (rows, at least MIN_ELEMENTS, 2),
    only_windowed: as in PictureRows.
    """

    block_tables: tuple[mx.array, ...]
    cu_seqlens_q: mx.array
    seq_lens: mx.array
    tiles: dict[int, mx.array]
    splits: dict[tuple[int, int], int]
    repeats: bool
    spans: mx.array | None = None
    only_windowed: bool = False

    def metadata(self, group: int, queries_per_kv: int) -> VarlenMetadata:
        """What the kernel reads, for layers of a KV group with this many query heads per KV
        head."""
        tables, tiles = self.block_tables[group], self.tiles[queries_per_kv]
        return VarlenMetadata(tables, self.cu_seqlens_q, self.seq_lens, tiles)


class WholePrompt(NamedTuple):
    """One prompt from its first token on: one "causal" call, whose shapes repeat.

    slots: (num_rows,) int32 per KV group.  Padding repeats the first slot; no real row sees it.
    """

    slots: tuple[mx.array, ...]
    repeats: bool = True


class PagedPlan(NamedTuple):
    """The first rows of a step are decodes, the rest are prompts.  None: the step has no such rows.

    positions: (num_rows or more,) int32, the position by which each row rotates.
    fused: whether `paged_decode` writes the rows.  It must not if a row reads another new row.
    recurrent: the segments of recurrent layers.
    """

    decodes: Decodes | None
    prompts: VarlenPrompts | WholePrompt | SdpaPlan | None
    positions: mx.array
    fused: bool
    recurrent: SegmentPlan | None

    @property
    def num_decodes(self) -> int:
        return self.decodes.num_rows if self.decodes else 0

    @property
    def repeats(self) -> bool:
        """See DeviceBatch."""
        return self.prompts is None or self.prompts.repeats


class KernelStepAttention:
    """See StepAttention.

    ticket: orders writes and reads across launches.  unused_kernels: the kernels that the step must
    not launch.  shares: for each layer, whether it reads a shared prefix once.
    """

    def __init__(
        self,
        store: PagedStore,
        step: DeviceBatch,
        ticket: mx.array,
        unused_kernels: Collection[str],
        shares: Sequence[bool],
    ) -> None:
        self.store, self.step, self.ticket = store, step, ticket
        self.plan: PagedPlan = step.plan
        self.unused_kernels, self.shares = unused_kernels, shares

    @property
    def recurrence(self) -> KernelRecurrence:
        assert self.plan.recurrent is not None, "a step without recurrent states"
        return KernelRecurrence(self.store.states, self.plan.recurrent, self)

    @property
    def state(self) -> list[mx.array]:
        # One shape for every kernel: compiled steps depend on shapes.
        return [self.ticket.reshape(-1)[:MIN_ELEMENTS]]

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        dtype = self.store.specs[layer].dtype
        k, v = k.astype(dtype), v.astype(dtype)
        self.ticket = kv_write(k, v, self._slot_mapping(layer), self._store(layer))

    def rope_write(self, layer: int, q: Heads, k: Heads, v: Heads) -> mx.array | NewRows | None:
        """Norm and rotate q and k, write k and v; returns q (num_rows, H, D), for `attend`.

        Returns NewRows if `attend` will do all of this, and None if no kernel supports these heads.
        """
        spec = self.store.specs[layer]
        kept = [(spec.num_kv_heads, spec.k_head_dim), (spec.num_kv_heads, spec.v_head_dim)]
        if [(h.num_heads, h.head_dim) for h in (k, v)] != kept or q.head_dim != k.head_dim:
            return None
        if v.norm or v.rope or not same_rope(q.rope, k.rope) or not (k.rope or k.norm):
            return None
        if any(h.stride or h.columns.array.dtype != spec.dtype for h in (q, k, v)):
            return None
        columns, norms = (q.columns, k.columns, v.columns), (q.norm, k.norm)
        new = NewRows(*columns, q.num_heads, k.rope, *norms, self.plan.positions)
        if self.plan.fused:
            return new
        if "rope_write" in self.unused_kernels:
            return None
        rows, self.ticket = rope_write(new, self._slot_mapping(layer), self._store(layer))
        return rows

    def latent_write(self, layer: int, q: Heads, latents: Latents, k_pe: Heads) -> mx.array | None:
        """Norm latents, rotate k_pe and q, write latents and k_pe; returns q (num_rows, H, rope).

        q: whole heads, or the rotary part of each.  Returns None if the kernel does not support
        these rows.
        """
        spec = self.store.specs[layer]
        rope, norm = k_pe.rope, latents.norm
        if "latent_write" in self.unused_kernels or rope is None:
            return None
        kept = spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim, spec.v_head_dim
        if (k_pe.num_heads, latents.kv_lora_rank, k_pe.head_dim, q.head_dim) != kept:
            return None
        if norm.weight is None or q.norm or k_pe.norm or not same_rope(q.rope, rope):
            return None
        if any(rows.columns.array.dtype != spec.dtype for rows in (q, latents, k_pe)):
            return None
        stride = q.stride or q.head_dim
        columns = q.columns, stride, q.num_heads, latents.columns, k_pe.columns
        new = NewLatents(*columns, norm, rope, self.plan.positions)
        q_pe, self.ticket = latent_write(new, self._slot_mapping(layer), self._store(layer))
        return q_pe

    def attend(self, q: mx.array | NewRows, call: AttentionCall) -> mx.array:
        decodes, prompts = self.plan.decodes, self.plan.prompts
        dtype, count = self.store.specs[call.layer].dtype, self.plan.num_decodes
        if call.q_pe is not None:
            call = call._replace(q_pe=call.q_pe.astype(dtype))
        if isinstance(q, NewRows):
            assert decodes is not None, "new rows in a step without decodes"
            return self._decode(q, decodes, call)
        rows, outputs = q.astype(dtype), []
        if decodes is not None:
            decode = self._decode if call.q_pe is None else self._decode_latents
            outputs.append(decode(rows[:count], decodes, call))
        if isinstance(prompts, VarlenPrompts):
            outputs.append(self._varlen(rows[count:], prompts, call))
        elif prompts is not None:
            outputs.append(self._sdpa(rows[count:], prompts, call))
        out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        out = out.astype(q.dtype)
        if self.step.num_rows >= profile().submitted_rows and self.step.batch is not None:
            mx.async_eval(out)  # not traced: the device works while the host builds the next layer
        return out

    def _decode(self, q: mx.array | NewRows, decodes: Decodes, call: AttentionCall) -> mx.array:
        store, scores, shared = self._store(call.layer), call.scores, decodes.prefix
        tables = decodes.block_tables[self.store.group_of[call.layer]]
        seq_lens, num_kv_heads = decodes.seq_lens, store.spec.num_kv_heads
        num_heads = q.num_heads if isinstance(q, NewRows) else q.shape[1]
        plan, prefix = decodes.plans[num_kv_heads], None
        if shared and self.shares[call.layer] and scores.window is None:
            plan = shared.plans[num_kv_heads]
            splits = prefix_splits(decodes.num_rows, num_heads, num_kv_heads, shared.length)
            arrays = q, tables, shared.leader, shared.lens
            prefix = shared_prefix(*arrays, store, scores, splits=splits)
            store = store._replace(ticket=prefix.lse)
        out, self.ticket = paged_decode(
            q, tables, seq_lens, store, scores, plan=plan, prefix=prefix
        )
        return out

    def _decode_latents(self, q: mx.array, decodes: Decodes, call: AttentionCall) -> mx.array:
        assert call.q_pe is not None, "queries of latents have a rotary part"
        store = self._store(call.layer)
        splits = decodes.plans[store.spec.num_kv_heads].splits
        tables = decodes.block_tables[self.store.group_of[call.layer]]
        metadata = decode_metadata(tables, decodes.seq_lens, *q.shape[:2])
        q_pe, scale = call.q_pe[: len(q)], call.scores.scale
        out, self.ticket = latent_attention(q, q_pe, metadata, store, scale=scale, splits=splits)
        return out

    def _varlen(self, q: mx.array, prompts: VarlenPrompts, call: AttentionCall) -> mx.array:
        store, group = self._store(call.layer), self.store.group_of[call.layer]
        num_heads, kv_heads = q.shape[1], store.spec.num_kv_heads
        metadata = prompts.metadata(group, num_heads // kv_heads)
        splits = prompts.splits[num_heads, kv_heads]
        if call.q_pe is not None:
            assert prompts.spans is None, "latent_attention reads only what comes before a row"
            rows, scale = (q, call.q_pe[-len(q) :], metadata, store), call.scores.scale
            out, self.ticket = latent_attention(*rows, scale=scale, splits=splits)
        else:
            sees = sees_spans(prompts.only_windowed, call.scores.window)
            spans = prompts.spans if sees else None
            out, self.ticket = varlen_prefill(
                q, metadata, store, call.scores, splits=splits, spans=spans
            )
        return out

    def _sdpa(self, q: mx.array, prompts: WholePrompt | SdpaPlan, call: AttentionCall) -> mx.array:
        take = take_rows if "gather_rows" in self.unused_kernels else gather_rows
        group, gather = self.store.group_of[call.layer], partial(self._gather, call.layer)
        if isinstance(prompts, WholePrompt):
            return attend_whole_prompt(q, *gather(prompts.slots[group]), call.scores)
        return execute_calls(prompts, group, q, call, gather, take)

    def _gather(self, layer: int, slots: mx.array) -> tuple[mx.array, mx.array]:
        k, v, self.ticket = kv_gather(slots, self._store(layer))
        return k, v

    def _slot_mapping(self, layer: int) -> mx.array:
        return self.step.slot_mapping[self.store.group_of[layer]]

    def _store(self, layer: int) -> LayerStore:
        s = self.store
        return LayerStore(s.keys[layer], s.values[layer], self.ticket, s.specs[layer], s.block_size)
