"""The kernels' plan for one step: its decodes, their shared prefix, and its prompts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import Arrays, Step, make_step, pad_rows
from vllm_metal_lite.attention.paged.common_prefix import CommonPrefix
from vllm_metal_lite.attention.paged.prompts import SdpaPrompts, VarlenPrompts, pad_tables
from vllm_metal_lite.attention.sdpa.plan import power_of_two
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.kernels.decode import DecodePlan, decode_plan


@dataclass(frozen=True)
class PagedPlan:
    """The first num_decodes rows of a step are decodes; the rest are prompts.

    block_tables (num_decodes, W), one per KV group, and seq_lens (num_decodes,) int32 describe the
    decodes.  In a step of only decodes they include padded rows, with a seq_len of 0.
    decode_plans: number of KV heads -> the plan of such layers.
    writes_late: no row sees another new row, so attention may write the step's rows itself.
    prefix_len: the largest power of two within the decodes' shared prefix; 0 = no shared prefix.
    leader (1,), prefix_lens (num_decodes,): the CommonPrefix, or None.  own_plans: as decode_plans,
    for the keys after the prefix.
    prompts: None in a step of only decodes.
    """

    num_decodes: int
    writes_late: bool
    prompts: VarlenPrompts | SdpaPrompts | None
    block_tables: tuple[mx.array, ...] = ()
    seq_lens: mx.array | None = None
    decode_plans: Mapping[int, DecodePlan] = field(default_factory=dict)
    prefix_len: int = 0
    leader: mx.array | None = None
    prefix_lens: mx.array | None = None
    own_plans: Mapping[int, DecodePlan] = field(default_factory=dict)

    @property
    def repeats(self) -> bool:
        """Whether steps of the same shapes are likely to repeat, so that compiling one pays."""
        return self.prompts is None or self.prompts.repeats

    @property
    def arrays(self) -> Arrays:
        prompts = self.prompts and self.prompts.arrays
        return self.block_tables, self.seq_lens, self.leader, self.prefix_lens, prompts

    def with_arrays(self, arrays: Arrays) -> "PagedPlan":
        block_tables, seq_lens, leader, prefix_lens, of_prompts = arrays
        return replace(
            self,
            block_tables=tuple(block_tables),
            seq_lens=seq_lens,
            leader=leader,
            prefix_lens=prefix_lens,
            prompts=self.prompts and self.prompts.with_arrays(of_prompts),
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
) -> Step:
    """decodes: `batch` itself, `batch.as_decodes()` or `batch.as_prompts()`.  splits: contexts may
    be cut.  writes_late: attention may write rows.
    """
    count = decodes.num_decodes
    plan = PagedPlan(
        num_decodes=count if prompts else num_rows,
        writes_late=(
            writes_late and prompts is None and decodes is batch and not batch.reads_new_rows
        ),
        prompts=prompts,
    )
    if count:
        plan = _with_decodes(plan, decodes, prefix, kv_heads, splits)
    if not plan.repeats:
        return make_step(batch, num_rows, plan)
    num_logits = _num_logits(batch, count, prompts is not None)
    step = make_step(batch, num_rows, plan, num_logits=num_logits)
    shapes = [None if a is None else tuple(a.shape) for a in backend.leaves(step.arrays)]
    plans = *plan.decode_plans.values(), *plan.own_plans.values()
    variant = plan.num_decodes, plan.writes_late, plan.prefix_len, *plans, *shapes
    return replace(step, variant=variant)


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
    width = power_of_two(-(-longest // decodes.block_size))
    tables = (b.block_tables[:count] for b in decodes.by_group)
    plan = replace(
        plan,
        block_tables=tuple(mx.array(pad_tables(t, rows, width)) for t in tables),
        seq_lens=mx.array(pad_rows(seq_lens, rows)),
        decode_plans=plans(longest),
    )
    if prefix is None:
        return plan
    own = int((seq_lens - prefix.lens).max())
    return replace(
        plan,
        prefix_len=1 << (int(prefix.lens.max()).bit_length() - 1),
        leader=mx.array([prefix.leader], mx.int32),
        prefix_lens=mx.array(pad_rows(prefix.lens, rows)),
        own_plans=plans(own),
    )


def _num_logits(batch: ForwardBatch, num_decodes: int, has_prompts: bool) -> int:
    """Rows that get logits, rounded so that shapes repeat: one per segment, terminal or not, and
    more if prompts are scored."""
    num_logits = power_of_two(batch.num_segments)
    if has_prompts:
        num_logits = num_decodes + power_of_two(batch.num_segments - num_decodes)
    wanted = len(batch.logits_indices)
    return num_logits if wanted <= num_logits else power_of_two(wanted)
