"""The kernels' plan for one step: its decodes, their shared prefix, and its prompts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import Arrays, Step, make_step, pad_rows
from vllm_metal_lite.attention.paged.common_prefix import CommonPrefix
from vllm_metal_lite.attention.paged.prompts import SdpaPrompts, VarlenPrompts, pad_tables
from vllm_metal_lite.attention.sdpa.plan import power_of_two
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.kernels.common import MIN_ELEMENTS
from vllm_metal_lite.kernels.decode import DecodePlan, decode_plan
from vllm_metal_lite.recurrence.kernels import SegmentPlan


@dataclass(frozen=True)
class PagedPlan:
    """The first num_decodes rows of a step are decodes; the rest are prompts.

    block_tables (num_decodes, W), one per KV group, and seq_lens (num_decodes,) int32 describe the
    decodes.  W and the lengths of arrays are at least MIN_ELEMENTS.  In a step of only decodes they
    include padded rows, with a seq_len of 0.
    decode_plans: number of KV heads -> the plan of such layers.
    writes_late: no row sees another new row, so attention may write the step's rows itself.
    positions: (num_rows,), for `rope_write`; None if attention writes the rows.
    prefix_len: the largest power of two within the decodes' shared prefix; 0 = no shared prefix.
    leader (1,), prefix_lens (num_decodes,): the CommonPrefix, or None.  own_plans: as decode_plans,
    for the keys after the prefix.
    prompts: None in a step of only decodes.
    recurrent: the segments of recurrent layers, or None.
    """

    num_decodes: int
    writes_late: bool
    prompts: VarlenPrompts | SdpaPrompts | None
    positions: mx.array | None = None
    block_tables: tuple[mx.array, ...] = ()
    seq_lens: mx.array | None = None
    decode_plans: Mapping[int, DecodePlan] = field(default_factory=dict)
    prefix_len: int = 0
    leader: mx.array | None = None
    prefix_lens: mx.array | None = None
    own_plans: Mapping[int, DecodePlan] = field(default_factory=dict)
    recurrent: SegmentPlan | None = None

    @property
    def repeats(self) -> bool:
        """Whether steps of the same shapes are likely to repeat, so that compiling one pays."""
        return self.prompts is None or self.prompts.repeats

    @property
    def arrays(self) -> Arrays:
        prompts = self.prompts and self.prompts.arrays
        return (
            self.positions,
            self.block_tables,
            self.seq_lens,
            self.leader,
            self.prefix_lens,
            prompts,
            self.recurrent and self.recurrent.arrays,
        )

    def with_arrays(self, arrays: Arrays) -> "PagedPlan":
        positions, block_tables, seq_lens, leader, prefix_lens, of_prompts, of_segments = arrays
        return replace(
            self,
            positions=positions,
            block_tables=tuple(block_tables),
            seq_lens=seq_lens,
            leader=leader,
            prefix_lens=prefix_lens,
            prompts=self.prompts and self.prompts.with_arrays(of_prompts),
            recurrent=self.recurrent and self.recurrent.with_arrays(of_segments),
        )


def plan_step(
    batch: ForwardBatch,
    num_rows: int,
    decodes: ForwardBatch,
    prompts: VarlenPrompts | SdpaPrompts | None,
    prefix: CommonPrefix | None,
    kv_heads: Collection[int],
    *,
    splits: bool,
    writes_late: bool,
    num_state_slots: int = 0,
) -> Step:
    """decodes: `batch` itself, `batch.as_decodes()` or `batch.as_prompts()`.  splits: contexts may
    be cut.  writes_late: attention may write rows.  num_state_slots: of the pool of recurrent
    states; 0: there is none.
    """
    count = decodes.num_decodes
    writes_late = writes_late and prompts is None and decodes is batch and not batch.reads_new_rows
    plan = PagedPlan(
        num_decodes=count if prompts else num_rows,
        writes_late=writes_late,
        prompts=prompts,
        positions=None if writes_late else _padded(batch.positions, num_rows),
    )
    if count:
        plan = _with_decodes(plan, decodes, prefix, kv_heads, splits)
    if num_state_slots:
        plan = replace(plan, recurrent=_segments(batch, num_rows, num_state_slots))
    if not plan.repeats:
        return make_step(batch, num_rows, plan, num_slots=MIN_ELEMENTS)
    num_logits = _num_logits(batch, count, prompts is not None)
    step = make_step(batch, num_rows, plan, num_slots=MIN_ELEMENTS, num_logits=num_logits)
    shapes = [None if a is None else tuple(a.shape) for a in backend.leaves(step.arrays)]
    plans = *plan.decode_plans.values(), *plan.own_plans.values()
    longest = plan.recurrent and plan.recurrent.max_seqlen
    variant = plan.num_decodes, plan.writes_late, plan.prefix_len, longest, *plans, *shapes
    return replace(step, variant=variant)


def _segments(batch: ForwardBatch, num_rows: int, num_slots: int) -> SegmentPlan:
    """The segments of recurrent layers, their number rounded so that shapes repeat."""
    prompts = batch.num_segments - batch.num_decodes
    count = batch.num_decodes + power_of_two(prompts) if prompts else num_rows
    return SegmentPlan.plan(batch, num_rows, count, num_slots)


def _with_decodes(
    plan: PagedPlan,
    decodes: ForwardBatch,
    prefix: CommonPrefix | None,
    kv_heads: Collection[int],
    splits: bool,
) -> PagedPlan:
    count, rows = decodes.num_decodes, plan.num_decodes

    def plans(longest: int) -> dict[int, DecodePlan]:
        found = {h: decode_plan(rows, h, longest) for h in kv_heads}
        return found if splits else {h: p._replace(splits=1) for h, p in found.items()}

    seq_lens = decodes.seq_lens[:count]
    longest = int(seq_lens.max())
    width = max(power_of_two(-(-longest // decodes.block_size)), MIN_ELEMENTS)
    tables = (b.block_tables[:count] for b in decodes.by_group)
    plan = replace(
        plan,
        block_tables=tuple(mx.array(pad_tables(t, rows, width)) for t in tables),
        seq_lens=_padded(seq_lens, rows),
        decode_plans=plans(longest),
    )
    if prefix is None:
        return plan
    own = int((seq_lens - prefix.lens).max())
    return replace(
        plan,
        prefix_len=1 << (int(prefix.lens.max()).bit_length() - 1),
        leader=mx.array([prefix.leader], mx.int32),
        prefix_lens=_padded(prefix.lens, rows),
        own_plans=plans(own),
    )


def _padded(rows: np.ndarray, num_rows: int) -> mx.array:
    """(n,) -> (num_rows,) or more, on the device."""
    return mx.array(pad_rows(rows, max(num_rows, MIN_ELEMENTS)))


def _num_logits(batch: ForwardBatch, num_decodes: int, has_prompts: bool) -> int:
    """Rows that get logits, rounded so that shapes repeat: one per segment, terminal or not, and
    more if prompts are scored."""
    num_logits = power_of_two(batch.num_segments)
    if has_prompts:
        num_logits = num_decodes + power_of_two(batch.num_segments - num_decodes)
    wanted = len(batch.logits_indices)
    return num_logits if wanted <= num_logits else power_of_two(wanted)
