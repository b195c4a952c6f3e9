"""Attention and K/V writes through the kernels of metal/, on Metal and CUDA.

Decode rows go through `paged_decode`, which reads the store in place; a long prefix that they share
is read once for all of them, by `shared_prefix` (see shared.py).  Prompts, whole or in chunks,
go through `varlen_prefill`, which reads the store in place too, or through MLX's SDPA on what
`kv_gather` copies out of the store, cut into calls as the reference does: whichever is faster on
the device (see choose.py).
"""

from collections.abc import Collection
from functools import cached_property

import numpy as np

from vllm_metal_lite.attention.heads import Heads
from vllm_metal_lite.attention.reference import DeviceGroup, ReferenceAttention, SdpaPlan
from vllm_metal_lite.attention.shared import CommonPrefix, common_prefix
from vllm_metal_lite.attention.step import AttentionShape, StepMetadata, pad_rows
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch import ForwardBatch
from vllm_metal_lite.kernels import ops
from vllm_metal_lite.kernels.prefill import plan_tiles, varlen_prefill
from vllm_metal_lite.kernels.rope import NewRows, rope_write, unsupported
from vllm_metal_lite.kernels.rows import gather_rows
from vllm_metal_lite.kernels.shared_prefix import prefix_splits, shared_prefix
from vllm_metal_lite.kv.store import PagedStore

PREFILLS = ("varlen", "gather")


class _Prompts:
    """The segments of a step behind its decodes; num_rows of their own, padding included."""

    def __init__(self, batch: ForwardBatch, num_rows: int) -> None:
        self.batch, self.num_rows = batch, num_rows
        self.sdpa = [SdpaPlan(b, num_rows) for b in batch.by_group]
        self._tiles: dict[int, mx.array] = {}

    @cached_property
    def metadata(self) -> list[tuple[mx.array, mx.array, mx.array]]:
        """By KV group: block_tables, cu_seqlens_q, seq_lens, which only `varlen_prefill` wants."""
        lengths = mx.array(self.batch.cu_seqlens_q), mx.array(self.batch.seq_lens)
        return [(mx.array(_widen(b.block_tables)), *lengths) for b in self.batch.by_group]

    def tiles(self, group: int) -> mx.array:
        """The tiles of `varlen_prefill` for layers of `group` query heads a KV head."""
        if group not in self._tiles:
            tiles = plan_tiles(self.batch.cu_seqlens_q, self.num_rows, group)
            self._tiles[group] = mx.array(tiles)
        return self._tiles[group]


class KernelStep(StepMetadata):
    """A step whose first num_decodes rows are decodes, and the rest prompts.

    block_tables (num_decodes, W), one a KV group, and seq_lens (num_decodes,) int32 are of the
    decodes; in a step of nothing else they cover the padded rows too, with a seq_len of 0.
    plans: the `decode_plan` of layers by their number of KV heads.
    writes_late: attention may write the step's rows, for no row sees another one of them.
    prefix_len: the largest power of two within the prefix that decodes share, 0 = they share none.
    leader (1,), prefix_lens (num_decodes,): the CommonPrefix, or None.  own_plans: as plans, of
    what is behind it.
    """

    arrays = (*StepMetadata.arrays, "block_tables", "seq_lens", "leader", "prefix_lens")

    def __init__(
        self,
        batch: ForwardBatch,
        num_rows: int,
        kv_heads: Collection[int],
        prefix: CommonPrefix | None = None,
    ) -> None:
        super().__init__(batch, num_rows)
        count = batch.num_decodes
        self.prompts, self.writes_late = None, False
        if count < batch.num_segments:
            self.prompts = _Prompts(batch.prefills(), num_rows - count)
        self.num_decodes = count if self.prompts else num_rows
        self.prefix_len, self.leader, self.prefix_lens, self.own_plans = 0, None, None, {}
        if prefix:
            length, own = prefix.lens.max(), (batch.seq_lens[:count] - prefix.lens).max()
            self.prefix_len = 1 << (int(length).bit_length() - 1)
            self.leader = mx.array([prefix.leader], mx.int32)
            self.prefix_lens = mx.array(pad_rows(prefix.lens, self.num_decodes))
            self.own_plans = {h: ops.decode_plan(self.num_decodes, h, int(own)) for h in kv_heads}
        if count:
            longest = int(batch.seq_lens[:count].max())
            width = -(-longest // batch.block_size)
            tables = [_widen(b.block_tables[:count, :width]) for b in batch.by_group]
            self.block_tables = [mx.array(pad_rows(t, self.num_decodes)) for t in tables]
            self.seq_lens = mx.array(pad_rows(batch.seq_lens[:count], self.num_decodes))
            self.plans = {h: ops.decode_plan(self.num_decodes, h, longest) for h in kv_heads}
            if not self.prompts:
                self.writes_late = not batch.reads_new_rows
                plans = *self.plans.values(), self.prefix_len, *self.own_plans.values()
                self.variant = (num_rows, tables[0].shape[1], self.writes_late, *plans)


def _widen(tables: np.ndarray) -> np.ndarray:
    """Block tables of a width that is a power of two, so that shapes repeat from step to step."""
    count, width = tables.shape
    out = np.zeros((count, 1 << (width - 1).bit_length()), tables.dtype)
    out[:, :width] = tables
    return out


class KernelAttention(ReferenceAttention):
    """The store is written and read by kernels only; a token keeps them in order.

    prefill: "varlen" or "gather", how prompts attend.  shares: `shared_prefix` may be used.
    """

    name = "kernels"
    overlaps = True

    def __init__(
        self, store: PagedStore, prefill: str, fuses: bool = True, shares: bool = True
    ) -> None:
        super().__init__(store)
        # Layers of which a prefix can be read once: they see all of it, as the matrices take it.
        self._shares = [
            shares and spec.window is None and spec.bits is None
            and not ops.head_size_problem((spec.k_head_dim, spec.v_head_dim), ops.MAX_PREFILL_DIM)
            for spec in store.specs
        ]  # fmt: skip
        self.prefill, self.fuses = prefill, fuses
        self.token = ops.new_token()
        self._kv_heads = sorted({keys.shape[1] for keys in store.keys})

    @property
    def state(self) -> list[mx.array]:
        # One shape, whichever kernel was the last: a compiled step is compiled for shapes.
        return [self.token.reshape(-1)[:1]]

    @state.setter
    def state(self, state: list[mx.array]) -> None:
        (self.token,) = state

    def prepare(self, batch: ForwardBatch, num_rows: int) -> KernelStep:
        decodes = slice(batch.num_decodes)
        groups = {g for g, shares in zip(self.store.group_of, self._shares, strict=True) if shares}
        tables = [batch.by_group[g].block_tables[decodes] for g in groups]
        prefix = None
        if tables:
            prefix = common_prefix(tables, batch.seq_lens[decodes], batch.block_size)
        return KernelStep(batch, num_rows, self._kv_heads, prefix)

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
        if step.writes_late and not (step.prefix_len and self._shares[layer]):
            return new
        slot_mapping = step.slot_mapping[self.store.group_of[layer]]
        rows, self.token = rope_write(
            new, positions=step.positions, slot_mapping=slot_mapping,
            keys=keys, values=values, token=self.token,
        )  # fmt: skip
        return rows

    def gather(self, layer: int, group: DeviceGroup) -> tuple[mx.array, mx.array]:
        spec = self.store.specs[layer]
        k, v, self.token = ops.kv_gather(group.kv_slots, *self._store(layer), spec)
        return k, v

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
        rows, outputs = q if new else q.astype(spec.dtype), []
        if step.num_decodes:
            decodes = rows if new else rows[: step.num_decodes]
            plan, prefix = step.plans[spec.num_kv_heads], None
            if step.prefix_len and self._shares[layer] and window is None:
                plan = step.own_plans[spec.num_kv_heads]
                splits = prefix_splits(
                    step.num_decodes, q.shape[1], spec.num_kv_heads, step.prefix_len
                )
                prefix = shared_prefix(
                    decodes, step.block_tables[group], step.leader, step.prefix_lens,
                    *self._store(layer), block_size=self.store.block_size, scale=scale,
                    softcap=softcap, splits=splits,
                )  # fmt: skip
                self.token = prefix.lse
            out, self.token = ops.paged_decode(
                decodes, step.block_tables[group], step.seq_lens, *self._store(layer),
                plan=plan, spec=spec, prefix=prefix, **in_place,
            )  # fmt: skip
            outputs.append(out)
        prompts = step.prompts
        if prompts and self.prefill == "varlen":
            out, self.token = varlen_prefill(
                rows[step.num_decodes :], *prompts.metadata[group],
                prompts.tiles(q.shape[1] // spec.num_kv_heads), *self._store(layer), **in_place,
            )  # fmt: skip
            outputs.append(out)
        elif prompts:
            outputs.append(super().attend(layer, rows[step.num_decodes :], prompts, **how))
        out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return out if new else out.astype(q.dtype)

    def _store(self, layer: int) -> tuple[mx.array, mx.array, mx.array]:
        return self.store.keys[layer], self.store.values[layer], self.token
