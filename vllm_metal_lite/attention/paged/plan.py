"""The kernels' plan for one step: its decodes, its prompts, and its recurrent segments."""

from dataclasses import dataclass, replace

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import Arrays, Step, make_step
from vllm_metal_lite.attention.paged.decodes import Decodes
from vllm_metal_lite.attention.paged.prompts import VarlenPrompts
from vllm_metal_lite.attention.sdpa.calls import SdpaPlan
from vllm_metal_lite.attention.sdpa.plan import power_of_two
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.kernels.common import MIN_ELEMENTS
from vllm_metal_lite.recurrence.kernels import SegmentPlan


@dataclass(frozen=True)
class PagedPlan:
    """The first rows of a step are decodes; the rest are prompts.  None: the step has none.

    positions: (num_rows,), for `rope_write`; None if attention writes the rows (`writes_late`).
    recurrent: the segments of recurrent layers.
    """

    decodes: Decodes | None
    prompts: VarlenPrompts | SdpaPlan | None
    positions: mx.array | None
    recurrent: SegmentPlan | None

    @property
    def num_decodes(self) -> int:
        return self.decodes.count if self.decodes else 0

    @property
    def writes_late(self) -> bool:
        """No row sees another new row, so attention may write the step's rows itself."""
        return self.positions is None

    @property
    def repeats(self) -> bool:
        """Whether steps of the same shapes are likely to repeat, so that compiling one pays."""
        return self.prompts is None or self.prompts.repeats

    @property
    def arrays(self) -> Arrays:
        parts = self.decodes, self.prompts, self.recurrent
        return self.positions, *(part and part.arrays for part in parts)

    def with_arrays(self, arrays: Arrays) -> "PagedPlan":
        positions, of_decodes, of_prompts, of_segments = arrays
        return PagedPlan(
            self.decodes and self.decodes.with_arrays(of_decodes),
            self.prompts and self.prompts.with_arrays(of_prompts),
            positions,
            self.recurrent and self.recurrent.with_arrays(of_segments),
        )

    def step(self, batch: ForwardBatch, num_rows: int) -> Step:
        """The step of this plan, of num_rows rows."""
        if not self.repeats:
            return make_step(batch, num_rows, self, num_slots=MIN_ELEMENTS)
        num_logits = self._num_logits(batch)
        step = make_step(batch, num_rows, self, num_slots=MIN_ELEMENTS, num_logits=num_logits)
        shapes = [None if a is None else tuple(a.shape) for a in backend.leaves(step.arrays)]
        longest = self.recurrent and self.recurrent.max_seqlen
        decodes = self.decodes.variant if self.decodes else ()
        return replace(step, variant=(self.writes_late, longest, *decodes, *shapes))

    def _num_logits(self, batch: ForwardBatch) -> int:
        """Rows that get logits, rounded so that shapes repeat: one per segment, terminal or not,
        and more if prompts are scored."""
        first = self.num_decodes if self.prompts else 0
        num_logits = first + power_of_two(batch.num_segments - first)
        wanted = len(batch.logits_indices)
        return num_logits if wanted <= num_logits else power_of_two(wanted)


def plan_recurrent(batch: ForwardBatch, num_rows: int) -> SegmentPlan:
    """The segments of recurrent layers, their number rounded so that shapes repeat."""
    prompts = batch.num_segments - batch.num_decodes
    count = batch.num_decodes + power_of_two(prompts) if prompts else num_rows
    return SegmentPlan.plan(batch, num_rows, count)
