"""The kernels' plan for one step: its decodes, its prompts, and its recurrent segments."""

from typing import NamedTuple

from vllm_metal_lite.attention.paged.decodes import Decodes
from vllm_metal_lite.attention.paged.varlen_prompts import VarlenPrompts
from vllm_metal_lite.attention.sdpa.calls import SdpaPlan, WholePrompt
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.kernels.launch import power_of_two
from vllm_metal_lite.recurrence.kernels import SegmentPlan


class PagedPlan(NamedTuple):
    """The first rows of a step are decodes; the rest are prompts.  None: the step has none.

    positions: (num_rows,), for `rope_write`; None if `paged_decode` writes the rows, which is
    allowed only if no row reads another new row.
    recurrent: the segments of recurrent layers.
    """

    decodes: Decodes | None
    prompts: VarlenPrompts | WholePrompt | SdpaPlan | None
    positions: mx.array | None
    recurrent: SegmentPlan | None

    @property
    def num_decodes(self) -> int:
        return self.decodes.num_rows if self.decodes else 0

    @property
    def repeats(self) -> bool:
        """See StepPlan."""
        return self.prompts is None or self.prompts.repeats

    def num_logits(self, batch: ForwardBatch) -> int:
        """The fewest rows that get logits, rounded so that shapes repeat: one per segment, terminal
        or not, and more if prompts are scored."""
        if not self.repeats:
            return 1
        first = self.num_decodes if self.prompts else 0
        num_logits = first + power_of_two(batch.num_segments - first)
        wanted = len(batch.logits_indices)
        return num_logits if wanted <= num_logits else power_of_two(wanted)
