"""Plans steps whose attention runs on the kernels of metal/.

Decodes use `paged_decode`, which reads the store in place; `shared_prefix` reads a long prefix once
for all decodes that share it.  In the smallest steps each row of a prompt is attended to as a
decode.  Other prompts use `varlen_prefill`, which reads the store in place, or `kv_gather` and
MLX's SDPA.  For latent models, `latent_attention` serves decodes and replaces `varlen_prefill`.
"""

from collections.abc import Collection

import numpy as np

from vllm_metal_lite.attention.base import Step
from vllm_metal_lite.attention.paged.decodes import DecodePlanner, reads_new_rows
from vllm_metal_lite.attention.paged.step import KernelStepAttention, PagedPlan
from vllm_metal_lite.attention.paged.varlen_prompts import VarlenPrompts
from vllm_metal_lite.attention.sdpa.calls import SdpaPlan, WholePrompt
from vllm_metal_lite.attention.sdpa.fused import unfused
from vllm_metal_lite.attention.step_arrays import make_step, prompts_of, upload_padded
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.devices import profile
from vllm_metal_lite.kernels.launch import MIN_ELEMENTS
from vllm_metal_lite.kernels.registry import REGISTRY, Prefill, unused_kernels
from vllm_metal_lite.kernels.served_shapes import attention_problem, sees_prefixes
from vllm_metal_lite.kernels.store import new_ticket
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.recurrence.kernels import SegmentPlan
from vllm_metal_lite.specs import AttentionShape


class KernelAttention:
    """Plans steps, in which only kernels write and read the store.

    The state is the ticket that orders the kernels.  prefill: the path of large prompts.  shapes:
    the layers' shapes.  failed_kernels: not used; the registry names their fallbacks.
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
        self._shapes = shapes
        self._queries_per_kv = {s.num_heads // s.num_kv_heads for s in shapes}
        self._unused = unused_kernels(self.failed_kernels)
        decodes = self._unused.isdisjoint(("paged_decode", "latent_attention"))
        latents, can_share = any(s.latent for s in shapes), "shared_prefix" not in self._unused
        # `latent_attention` reads all keys of each row.
        self.shares = [can_share and not latents and sees_prefixes(spec) for spec in store.specs]
        works = "varlen" not in {REGISTRY[kernel].prefill for kernel in self._unused}
        self._varlen = works and not any(attention_problem(s, prefill=True) for s in shapes)
        self._fuses_decodes = not latents and "fused_decode" not in self._unused
        self._plan_decodes: DecodePlanner | None = None
        if decodes:
            of_layers = zip(store.group_of, self.shares, strict=True)
            self._plan_decodes = DecodePlanner(
                {keys.shape[1] for keys in store.keys},
                splits="merge_partitions" not in self._unused,
                sharing_groups=sorted({group for group, shared in of_layers if shared}),
                prompts_as_decodes=can_share,
            )

    def over(self, store: PagedStore) -> "KernelAttention":
        """The same attention over another store of the same layers."""
        return KernelAttention(
            store, self.prefill, self._shapes, failed_kernels=self.failed_kernels
        )

    def new_state(self) -> list[mx.array]:
        state = [new_ticket()]
        mx.eval(state)
        return state

    def prepare(self, batch: ForwardBatch, num_rows: int) -> Step:
        decodes = self._plan_decodes(batch, num_rows) if self._plan_decodes else None
        first = decodes.num_rows if decodes else 0  # row of the prompts, and their first segment
        prompts = None
        if first < batch.num_tokens:
            prompts = self._plan_prompts(batch, first, num_rows - first)
        only_decodes = decodes is not None and batch.num_decodes == batch.num_segments
        fused = only_decodes and self._fuses_decodes and not reads_new_rows(batch)
        positions = None if fused else upload_padded(batch.positions, max(num_rows, MIN_ELEMENTS))
        recurrent = SegmentPlan.plan(batch, num_rows) if self.store.states.num_slots else None
        plan = PagedPlan(decodes, prompts, positions, recurrent)
        num_logits = plan.num_logits(batch)
        return make_step(batch, num_rows, plan, num_slots=MIN_ELEMENTS, num_logits=num_logits)

    def begin(self, step: Step, state: list[mx.array]) -> KernelStepAttention:
        (ticket,) = state
        return KernelStepAttention(self.store, step, ticket, self._unused, self.shares)

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
        small = delays and num_rows <= device.small_rows
        scores = int(np.diff(prompts.cu_seqlens_q) @ prompts.seq_lens.astype(np.int64))
        cheap = small and self._varlen and scores <= device.small_scores
        if self.prefill == "varlen" or cheap:
            repeats = small or batch.num_segments == 1
            return VarlenPrompts.plan(prompts, num_rows, self._queries_per_kv, repeats)
        if self._takes_one_call(batch):
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
