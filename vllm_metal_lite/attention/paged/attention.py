"""Attention and K/V writes through the kernels of metal/, on Metal and CUDA.

Decodes use `paged_decode`, which reads the store in place.  `shared_prefix` reads a long prefix
once for all decodes that share it (see common_prefix.py).  Prompts, whole or in chunks, use the
faster path on the device: `varlen_prefill`, which reads the store in place, or `kv_gather` and
MLX's SDPA.  Of latents, `latent_attention` serves decodes, and prompts in the place of
`varlen_prefill`.  Small steps use repeating shapes (see prompts.py).  In the smallest steps each
row of a prompt is attended to as a decode.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from vllm_metal_lite.attention.base import Step
from vllm_metal_lite.attention.heads import Heads, Latents, RotaryPart, same_rope
from vllm_metal_lite.attention.paged.common_prefix import CommonPrefix, PrefixSearch
from vllm_metal_lite.attention.paged.plan import PagedPlan, plan_step
from vllm_metal_lite.attention.paged.prompts import SdpaPrompts, VarlenPrompts
from vllm_metal_lite.attention.sdpa.calls import SdpaCalls
from vllm_metal_lite.attention.sdpa.fused import unfused
from vllm_metal_lite.attention.sdpa.run import run_calls, take_rows
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.cache_ops import kv_gather, kv_write
from vllm_metal_lite.kernels.common import (
    MAX_PREFILL_DIM,
    MIN_ELEMENTS,
    head_size_problem,
    new_token,
)
from vllm_metal_lite.kernels.decode import paged_decode
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.latent_attention import Where, decode_tiles, latent_attention
from vllm_metal_lite.kernels.latent_write import NewLatents, latent_write
from vllm_metal_lite.kernels.new_rows import NewRows
from vllm_metal_lite.kernels.prefill import varlen_prefill
from vllm_metal_lite.kernels.rope_write import rope_unsupported, rope_write
from vllm_metal_lite.kernels.shared_prefix import SharedPrefix, prefix_splits, shared_prefix
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.recurrence.kernels import KernelRecurrence
from vllm_metal_lite.specs import AttentionShape

PREFILLS = ("varlen", "gather")


class KernelAttention:
    """Only kernels write and read the store.  The state is the token that orders the kernels.

    prefill: the path of prompts, "varlen" or "gather".  head_groups: query heads per KV head, over
    all layers.  without: kernels that are not used; each has a next best way (select.py).
    rows_as_decodes: rows, the largest step whose prompt rows may be attended to as decodes.
    latents: some layers keep latents.
    """

    name = "kernels"
    overlaps = True

    def __init__(
        self,
        store: PagedStore,
        prefill: str,
        head_groups: Collection[int],
        *,
        without: Collection[str] = (),
        rows_as_decodes: int = 0,
        latents: bool = False,
    ) -> None:
        self.latents = latents
        self.store, self.prefill, self.without = store, prefill, frozenset(without)
        self.rows_as_decodes = rows_as_decodes
        shares = self.without.isdisjoint(("shared_prefix", "paged_decode"))
        self._head_groups = sorted(head_groups)
        # `shared_prefix` needs full attention and a supported head size.
        self.shares = [
            shares and spec.window is None
            and not head_size_problem((spec.k_head_dim, spec.v_head_dim), MAX_PREFILL_DIM)
            for spec in store.specs
        ]  # fmt: skip
        of_layers = zip(store.group_of, self.shares, strict=True)
        self._sharing_groups = sorted({group for group, shared in of_layers if shared})
        self._prefix_search = PrefixSearch()
        self._kv_heads = sorted({keys.shape[1] for keys in store.keys})
        windows: list[list[int | None]] = [[] for _ in store.num_blocks]
        for spec, group in zip(store.specs, store.group_of, strict=True):
            windows[group].append(spec.window)
        self._windows = [_farthest(of_group) for of_group in windows]

    def over(self, store: PagedStore) -> "KernelAttention":
        """The same attention over another store."""
        return KernelAttention(
            store,
            self.prefill,
            self._head_groups,
            without=self.without,
            rows_as_decodes=self.rows_as_decodes,
            latents=self.latents,
        )

    def new_state(self) -> list[mx.array]:
        state = [new_token()]
        mx.eval(state)
        return state

    def prepare(self, batch: ForwardBatch, num_rows: int) -> Step:
        decodes, prefix = self._decodes(batch, num_rows)
        prompts: VarlenPrompts | SdpaPrompts | None = None
        if decodes.num_decodes < decodes.num_segments:
            rest, rows = decodes.prefills(), num_rows - decodes.num_decodes
            repeats = batch.num_decodes > 0 and rows <= profile().small_rows
            if self.prefill == "varlen":
                prompts = VarlenPrompts.plan(rest, rows, self._head_groups, repeats)
            else:
                prompts = SdpaPrompts.plan(rest, rows, self._windows, repeats)
        return plan_step(
            batch, num_rows, decodes, prompts, prefix, self._kv_heads,
            splits="merge_partitions" not in self.without,
            writes_late=not self.latents and "fused_decode" not in self.without,
            num_state_slots=self.store.states.num_slots,
        )  # fmt: skip

    def begin(self, step: Step, state: list[mx.array]) -> "KernelStepAttention":
        return KernelStepAttention(self, step, *state)

    def _decodes(
        self, batch: ForwardBatch, num_rows: int
    ) -> tuple[ForwardBatch, CommonPrefix | None]:
        """The batch, with prompt rows as decodes if that pays, and the decodes' shared prefix.

        The rows of a chunk can be decodes that share the chunk's context.  A small step then needs
        no launches for its prompts, and parallel splits read the context.
        """
        if not self.without.isdisjoint(("paged_decode", "latent_attention")):
            return batch.as_prompts(), None
        device = profile()
        if batch.num_decodes < batch.num_segments and num_rows <= self.rows_as_decodes:
            rows, first = batch.as_decodes(), batch.num_decodes
            prefix = self._common_prefix(rows, device.min_saved_for_prompts)
            own = rows.seq_lens - (prefix.lens if prefix else 0)
            if own[first:].sum() <= device.max_own_keys:
                return rows, prefix
        return batch, self._common_prefix(batch, device.min_saved_tokens)

    def _common_prefix(self, batch: ForwardBatch, min_saved: int) -> CommonPrefix | None:
        if not self._sharing_groups:
            return None
        decodes = slice(batch.num_decodes)
        tables = [batch.by_group[g].block_tables[decodes] for g in self._sharing_groups]
        seq_lens = batch.seq_lens[decodes]
        return self._prefix_search(tables, seq_lens, batch.block_size, min_saved)


def _farthest(windows: Sequence[int | None]) -> int | None:
    """The longest window; None, the whole context, is longest."""
    sizes = [window for window in windows if window is not None]
    return max(sizes) if sizes and len(sizes) == len(windows) else None


class _Call(NamedTuple):
    """The arguments of `attend` that the kernels support."""

    layer: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: mx.array | None
    q_pe: mx.array | None


class KernelStepAttention:
    """See StepAttention.  token: orders writes and reads across launches."""

    def __init__(self, attention: KernelAttention, step: Step, token: mx.array) -> None:
        self.attention, self.step, self.store = attention, step, attention.store
        self.plan: PagedPlan = step.plan
        self.token = token

    @property
    def recurrence(self) -> KernelRecurrence:
        assert self.plan.recurrent is not None, "a step without recurrent states"
        fused = "fused_recurrence" not in self.attention.without
        return KernelRecurrence(self.store.states, self.plan.recurrent, self, fused=fused)

    @property
    def state(self) -> list[mx.array]:
        # One shape for every kernel: compiled steps depend on shapes.
        return [self.token.reshape(-1)[:MIN_ELEMENTS]]

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        spec, slot_mapping = self.store.specs[layer], self._slot_mapping(layer)
        rows = k.astype(spec.dtype), v.astype(spec.dtype)
        self.token = kv_write(*rows, slot_mapping, *self._kv(layer), self.token, spec)

    def rope_write(self, layer: int, q: Heads, k: Heads, v: Heads) -> mx.array | NewRows | None:
        """Norm and rotate q and k, write k and v -> q (num_rows, H, D), for `attend`.

        NewRows: `attend` does all of this.  None: no kernel supports these heads.
        """
        spec = self.store.specs[layer]
        kept = [(spec.num_kv_heads, spec.k_head_dim), (spec.num_kv_heads, spec.v_head_dim)]
        if [(h.num_heads, h.head_dim) for h in (k, v)] != kept or q.head_dim != k.head_dim:
            return None
        if v.norm or v.rope or not q.same_rotation(k) or not (k.rope or k.norm):
            return None
        if any(h.columns.array.dtype != spec.dtype for h in (q, k, v)):
            return None
        shape = AttentionShape(q.num_heads, *kept[0], spec.v_head_dim, spec.dtype)
        if rope_unsupported(shape, k.rope) is not None:
            return None
        new = NewRows(q.columns, k.columns, v.columns, q.num_heads, k.rope, q.norm, k.norm)
        if self.plan.writes_late:
            return new
        if "rope_write" in self.attention.without:
            return None
        assert self.plan.positions is not None
        keys, values = self._kv(layer)
        rows, self.token = rope_write(
            new, positions=self.plan.positions, slot_mapping=self._slot_mapping(layer),
            keys=keys, values=values, token=self.token, spec=spec,
        )  # fmt: skip
        return rows

    def latent_write(
        self, layer: int, q: RotaryPart | Heads, latents: Latents, k_pe: Heads
    ) -> mx.array | None:
        """Norm latents, rotate k_pe and q, write latents and k_pe -> q (num_rows, H, rope).

        None: the kernel does not support these rows.
        """
        spec, positions = self.store.specs[layer], self.plan.positions
        stride = q.stride if isinstance(q, RotaryPart) else q.head_dim
        rope, norm = k_pe.rope, latents.norm
        if "latent_write" in self.attention.without or positions is None or rope is None:
            return None
        kept = spec.num_kv_heads, spec.k_head_dim, spec.v_head_dim, spec.v_head_dim
        if (k_pe.num_heads, latents.rank, k_pe.head_dim, q.head_dim) != kept:
            return None
        if norm.weight is None or k_pe.norm is not None or not same_rope(q.rope, rope):
            return None
        if isinstance(q, Heads) and q.norm is not None:
            return None
        columns = q.columns, latents.columns, k_pe.columns
        if any(c.array.dtype != spec.dtype for c in columns):
            return None
        shape = AttentionShape(q.num_heads, 1, spec.v_head_dim, spec.v_head_dim, spec.dtype)
        if rope_unsupported(shape, rope) is not None:
            return None
        new = NewLatents(columns[0], stride, q.num_heads, *columns[1:], norm, rope)
        keys, values = self._kv(layer)
        rows, self.token = latent_write(
            new, positions=positions, slot_mapping=self._slot_mapping(layer), keys=keys,
            values=values, token=self.token, spec=spec,
        )  # fmt: skip
        return rows

    def attend(
        self,
        layer: int,
        q: mx.array | NewRows,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
        q_pe: mx.array | None = None,
        chunk: int | None = None,
    ) -> mx.array:
        if chunk is not None:
            raise NotImplementedError("the kernels have no chunked attention")
        count, prompts, dtype = (
            self.plan.num_decodes,
            self.plan.prompts,
            self.store.specs[layer].dtype,
        )
        q_pe = None if q_pe is None else q_pe.astype(dtype)
        call = _Call(layer, scale, window, softcap, sinks, q_pe)
        if isinstance(q, NewRows):  # a step of only decodes
            return self._decode(q, call)
        rows, outputs = q.astype(dtype), []
        if count:
            outputs.append(self._decode(rows[:count], call))
        if isinstance(prompts, VarlenPrompts):
            outputs.append(self._varlen(rows[count:], prompts, call))
        elif prompts is not None:
            outputs.append(self._sdpa(rows[count:], prompts, call))
        out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return out.astype(q.dtype)

    def _decode(self, q: mx.array | NewRows, call: "_Call") -> mx.array:
        spec, plan = self.store.specs[call.layer], self.plan
        tables, seq_lens = plan.block_tables[self.store.group_of[call.layer]], plan.seq_lens
        assert seq_lens is not None, "a step without decodes"
        if call.q_pe is not None and isinstance(q, mx.array):
            cu_seqlens_q, tiles = decode_tiles(*q.shape[:2])
            splits = plan.decode_plans[spec.num_kv_heads].splits
            where = tables, cu_seqlens_q, seq_lens, tiles
            return self._latents(q, call.q_pe[: len(q)], where, call, splits)
        prefix, plans = None, plan.decode_plans
        if plan.prefix_len and self.attention.shares[call.layer] and call.window is None:
            prefix, plans = self._prefix(q, tables, seq_lens, call), plan.own_plans
        out, self.token = paged_decode(
            q, tables, seq_lens, *self._kv(call.layer), self.token,
            block_size=self.store.block_size, scale=call.scale, window=call.window,
            softcap=call.softcap, sinks=call.sinks, plan=plans[spec.num_kv_heads], spec=spec,
            prefix=prefix,
        )  # fmt: skip
        return out

    def _prefix(
        self, q: mx.array | NewRows, tables: mx.array, seq_lens: mx.array, call: "_Call"
    ) -> SharedPrefix:
        plan, spec = self.plan, self.store.specs[call.layer]
        assert plan.leader is not None
        assert plan.prefix_lens is not None
        num_heads = q.num_heads if isinstance(q, NewRows) else q.shape[1]
        splits = prefix_splits(plan.num_decodes, num_heads, spec.num_kv_heads, plan.prefix_len)
        prefix = shared_prefix(
            q, tables, seq_lens, plan.leader, plan.prefix_lens, *self._kv(call.layer), self.token,
            block_size=self.store.block_size, scale=call.scale, softcap=call.softcap,
            splits=splits, spec=spec,
        )  # fmt: skip
        self.token = prefix.lse
        return prefix

    def _varlen(self, q: mx.array, prompts: VarlenPrompts, call: "_Call") -> mx.array:
        tables = prompts.block_tables[self.store.group_of[call.layer]]
        spec = self.store.specs[call.layer]
        tiles = prompts.tiles[q.shape[1] // spec.num_kv_heads]
        if call.q_pe is not None:
            where = tables, prompts.cu_seqlens_q, prompts.seq_lens, tiles
            return self._latents(q, call.q_pe[-len(q) :], where, call)
        out, self.token = varlen_prefill(
            q, tables, prompts.cu_seqlens_q, prompts.seq_lens, tiles, *self._kv(call.layer),
            self.token, block_size=self.store.block_size, scale=call.scale, window=call.window,
            softcap=call.softcap, sinks=call.sinks, spec=spec,
        )  # fmt: skip
        return out

    def _latents(
        self, q: mx.array, q_pe: mx.array, where: Where, call: "_Call", splits: int = 1
    ) -> mx.array:
        """where: block tables, cu_seqlens_q, seq_lens and tiles of decodes or of prompts."""
        out, self.token = latent_attention(
            q, q_pe, *where, *self._kv(call.layer), self.token,
            block_size=self.store.block_size, scale=call.scale, splits=splits,
            spec=self.store.specs[call.layer],
        )  # fmt: skip
        return out

    def _sdpa(self, q: mx.array, prompts: SdpaPrompts, call: "_Call") -> mx.array:
        if call.q_pe is not None:
            q = mx.concatenate([q, call.q_pe[-len(q) :]], axis=-1)
        calls = prompts.sdpa[self.store.group_of[call.layer]].calls(
            call.window, unfused=unfused(q.shape[1], q.shape[2], call.softcap)
        )
        return run_calls(
            calls,
            q,
            self._gather(call, calls),
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            take=take_rows if "gather_rows" in self.attention.without else gather_rows,
        )

    def _gather(self, call: "_Call", calls: SdpaCalls) -> Iterator[tuple[mx.array, mx.array]]:
        spec = self.store.specs[call.layer]
        for slots, parts in calls.gathers:
            k, v, self.token = kv_gather(slots, *self._kv(call.layer), self.token, spec)
            if call.q_pe is not None:  # latents and rotary keys; the values are the latents
                k, v = mx.concatenate([k, v], axis=-1), k
            yield from zip(parts.cut(k, axis=1), parts.cut(v, axis=1), strict=True)

    def _slot_mapping(self, layer: int) -> mx.array:
        return self.step.slot_mapping[self.store.group_of[layer]]

    def _kv(self, layer: int) -> tuple[mx.array, mx.array]:
        return self.store.keys[layer], self.store.values[layer]
