"""Plans steps whose attention runs on the kernels of metal/.

Decodes use `paged_decode`, which reads the store in place; `shared_prefix` reads a long prefix once
for all decodes that share it.  In the smallest steps each row of a prompt is attended to as a
decode.  Other prompts use `varlen_prefill`, which reads the store in place, or `kv_gather` and
MLX's SDPA.  For latent models, `latent_attention` serves decodes and replaces `varlen_prefill`.
"""

from collections.abc import Collection

import numpy as np

from vllm_metal_lite.attention.base import DeviceBatch
from vllm_metal_lite.attention.paged.decodes import DecodePlanner, Decodes, reads_new_rows
from vllm_metal_lite.attention.paged.step import (
    KernelStepAttention,
    PagedPlan,
    VarlenPrompts,
    WholePrompt,
)
from vllm_metal_lite.attention.sdpa.calls import SdpaPlan
from vllm_metal_lite.attention.sdpa.fused import unfused
from vllm_metal_lite.attention.step_arrays import (
    last_slots,
    make_step,
    pad_rows,
    planned_earlier,
    prompts_of,
    resized,
    rotary_positions,
    upload_padded,
    upload_tables,
)
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import PAD_SLOT, ForwardBatch
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS, power_of_two
from vllm_metal_lite.kernels.merge_partitions import num_splits
from vllm_metal_lite.kernels.prefill import TILE_ROWS
from vllm_metal_lite.kernels.registry import REGISTRY, Prefill, unused_kernels
from vllm_metal_lite.kernels.served_shapes import attention_problem, sees_prefixes
from vllm_metal_lite.kernels.store import new_ticket
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.recurrence.kernels import SegmentPlan
from vllm_metal_lite.specs import AttentionShape


class KernelAttention:
    """Plans steps, in which only kernels write and read the store.

    The state is the ticket that orders the kernels.  prefill: the path of large prompts.  shapes:
    the shapes of the layers.  failed_kernels: steps use the registry's fallbacks for these kernels.
    """

    name = "kernels"
    overlaps = True

    def __init__(
        self,
        store: PagedStore,
        prefill: Prefill,
        shapes: Collection[AttentionShape],
        *,
        failed_kernels: Collection[str] = (),
    ) -> None:
        self.store, self.prefill, self.failed_kernels = store, prefill, frozenset(failed_kernels)
        self._shapes, self._unused = shapes, unused_kernels(self.failed_kernels)
        latents, can_share = any(s.latent for s in shapes), "shared_prefix" not in self._unused
        # `latent_attention` reads all keys of each row.
        self.shares = [can_share and not latents and sees_prefixes(spec) for spec in store.specs]
        works = "varlen" not in {REGISTRY[kernel].prefill for kernel in self._unused}
        self._varlen = works and not any(attention_problem(s, prefill=True) for s in shapes)
        merges = "merge_partitions" not in self._unused
        splits = merges and (latents or "split_prefill" not in self._unused)
        self._reads_once = splits and self._varlen
        self._fuses_decodes = not latents and "fused_decode" not in self._unused
        self._plan_decodes: DecodePlanner | None = None
        if self._unused.isdisjoint(("paged_decode", "latent_attention")):
            self._plan_decodes = DecodePlanner(store, self.shares, merges, self._reads_once)

    def over(self, store: PagedStore) -> "KernelAttention":
        """The same attention over another store of the same layers."""
        return KernelAttention(
            store, self.prefill, self._shapes, failed_kernels=self.failed_kernels
        )

    def new_state(self) -> list[mx.array]:
        state = [new_ticket()]
        mx.eval(state)
        return state

    def prepare(self, batch: ForwardBatch, num_rows: int) -> DeviceBatch:
        """See Attention.  The plan: decodes first, then prompts, then recurrent layers."""
        decodes = self._plan_decodes(batch, num_rows) if self._plan_decodes else None
        first = decodes.num_rows if decodes else 0  # row of the prompts, and their first segment
        prompts = None
        if first < batch.num_tokens:
            prompts = self._plan_prompts(batch, first, num_rows - first)
        only_decodes = decodes is not None and batch.num_decodes == batch.num_segments
        fused = only_decodes and self._fuses_decodes and not reads_new_rows(batch)
        positions = upload_padded(rotary_positions(batch), max(num_rows, MIN_ELEMENTS))
        recurrent = SegmentPlan.plan(batch, num_rows) if self.store.states.num_slots else None
        plan, num_logits = PagedPlan(decodes, prompts, positions, fused, recurrent), 1
        if plan.repeats:  # one per segment, terminal or not; more if prompts are scored
            single = first if prompts else 0
            num_logits = single + power_of_two(batch.num_segments - single)
            if num_logits < len(batch.logits_indices):
                num_logits = power_of_two(len(batch.logits_indices))
        return make_step(batch, num_rows, plan, num_slots=MIN_ELEMENTS, num_logits=num_logits)

    def begin(self, step: DeviceBatch, state: list[mx.array]) -> KernelStepAttention:
        (ticket,) = state
        step = step if step.back is None else self._earlier(step, step.back)
        return KernelStepAttention(self.store, step, ticket, self._unused, self.shares)

    def _earlier(self, step: DeviceBatch, back: mx.array) -> DeviceBatch:
        """The step with each row moved back, on the device if its plan allows that."""
        plan: PagedPlan = step.plan
        rows = plan.decodes or plan.prompts
        if not isinstance(rows, Decodes | VarlenPrompts):
            return planned_earlier(self, step)
        seq_lens = rows.seq_lens - resized(back, len(rows.seq_lens))
        rows = rows._replace(seq_lens=seq_lens)
        slots = (last_slots(table, seq_lens, self.store.block_size) for table in rows.block_tables)
        if isinstance(rows, VarlenPrompts):
            plan = plan._replace(prompts=rows)
        else:  # a prefix that all share may be longer than an earlier row
            plan = plan._replace(decodes=rows._replace(prefix=None))
        positions = plan.positions - resized(back, len(plan.positions))
        return step._replace(
            positions=step.positions - back,
            slot_mapping=tuple(resized(s, len(step.slot_mapping[0]), PAD_SLOT) for s in slots),
            plan=plan._replace(positions=positions),
            back=None,
        )

    def _plan_prompts(
        self, batch: ForwardBatch, first: int, num_rows: int
    ) -> VarlenPrompts | WholePrompt | SdpaPlan:
        """The prompts from segment `first` on, padded to num_rows rows.

        The host takes longer to build a small step than the device to run it, which delays decodes
        beside the prompts.  So such a step is compiled, which needs shapes that repeat: those of
        kernels that read the store in place, or of a prompt alone, whose first token waits for the
        host.  Sizes of several prompts rarely repeat.  Decodes with drafts count as prompts here.
        """
        prompts, device = prompts_of(batch, first), profile()
        delays = batch.num_decodes > 0 or len(batch.draft_token_ids) > 0
        few = self._reads_once and first + num_rows <= device.rows_as_decodes
        small = few or (delays and num_rows <= device.small_rows)
        scores = int(np.diff(prompts.cu_seqlens_q) @ prompts.seq_lens.astype(np.int64))
        cheap = few or (small and self._varlen and scores <= device.small_scores)
        if self.prefill == "varlen" or cheap:
            repeats = small or batch.num_segments == 1
            heads = {(s.num_heads, s.num_kv_heads) for s in self._shapes}
            return plan_varlen(prompts, num_rows, heads, repeats, few)
        if self._takes_one_call(batch) and batch.spans is None:
            slots = (batch.slot_mapping(group) for group in range(len(batch.block_tables)))
            return WholePrompt(tuple(upload_padded(s, num_rows, int(s[0])) for s in slots))
        return SdpaPlan(prompts, num_rows)

    def _takes_one_call(self, batch: ForwardBatch) -> bool:
        """Whether a step is one prompt, for which all layers take one fused "causal" call."""
        length = batch.num_tokens
        is_whole = batch.num_segments == 1 and batch.seq_lens[0] == length
        return is_whole and not any(
            s.latent
            or unfused(s.num_heads, s.k_head_dim, s.softcap)
            or length > min(s.window or length, s.attention_chunk or length)
            for s in self._shapes
        )


def plan_varlen(
    batch: ForwardBatch,
    num_rows: int,
    heads: Collection[tuple[int, int]],
    repeats: bool,
    few: bool = False,
) -> VarlenPrompts:
    """Arrange prompts for kernels that read the store in place.

    num_rows: rows of prompts, including padding.  heads: query heads and KV heads of all layers.
    repeats: see DeviceBatch.  few: whether contexts are split until the device is full.
    """
    num_segments, device = power_of_two(batch.num_segments), profile()
    segments, most = max(num_segments, MIN_ELEMENTS), int(batch.seq_lens.max())
    width = power_of_two(-(-max(most, device.min_keys) // batch.block_size))
    cu_seqlens_q = pad_rows(batch.cu_seqlens_q, segments + 1, batch.num_tokens)
    spans, size = batch.spans, max(num_rows, MIN_ELEMENTS)
    tiles, splits = {}, {}
    for num_heads, kv_heads in sorted(heads):
        group = num_heads // kv_heads
        # If few, padding gets no tiles: each would cost a threadgroup for each split.
        cut = cu_seqlens_q[: num_segments + 1] if few else cu_seqlens_q
        planned = plan_tiles(cut, num_rows, group)
        tiles[group] = mx.array(planned)
        fill = device.prefix_fill // (kv_heads * max(1, int((planned[:, 0] >= 0).sum())))
        at_most = num_splits(fill, most, device.min_prefix_split_keys)
        splits[num_heads, kv_heads] = at_most if few else 1
    return VarlenPrompts(
        tuple(upload_tables(t, segments, width) for t in batch.block_tables),
        mx.array(cu_seqlens_q),
        upload_padded(batch.seq_lens, segments),
        tiles,
        splits,
        repeats,
        None if spans is None else upload_padded(spans, size),
        batch.pictures is not None and batch.pictures.only_windowed,
    )


def plan_tiles(cu_seqlens_q: np.ndarray, num_rows: int, num_queries_per_kv: int) -> np.ndarray:
    """Split a packed batch into tiles (T, 2) int32 for `varlen_prefill`, vectorised over segments.

    cu_seqlens_q: (S+1,), empty segments allowed.  num_rows: rows of q, padding included.
    num_queries_per_kv: query heads per KV head.  A tile is (segment, first of its TILE_ROWS (row,
    head) pairs in the segment).  Padding rows are in tiles of segment -1, which give zeros; their
    first pair counts from row 0.

    T depends only on S, num_rows and num_queries_per_kv.  The last rows of a segment come first:
    they see the most keys, and tiles that start last should be short.
    """
    used = int(cu_seqlens_q[-1])
    pairs = np.append(np.diff(cu_seqlens_q), num_rows - used).astype(np.int64) * num_queries_per_kv
    counts = -(-pairs // TILE_ROWS)
    total = max(num_rows * num_queries_per_kv // TILE_ROWS + len(counts), MIN_ELEMENTS // 2)
    ends = np.cumsum(counts)
    tiles = np.empty((total, 2), np.int32)
    tiles[ends[-1] :] = -1, num_rows * num_queries_per_kv  # past all rows: nothing to do
    real = tiles[: ends[-1]]
    real[:, 0] = np.repeat(np.arange(len(counts)), counts)
    real[:, 1] = (np.repeat(ends, counts) - 1 - np.arange(ends[-1])) * TILE_ROWS
    rest = real[:, 0] == len(counts) - 1
    real[rest] += np.array([-len(counts), used * num_queries_per_kv], np.int32)
    return tiles
