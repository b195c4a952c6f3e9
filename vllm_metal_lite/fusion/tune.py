"""Decides by timing whether products of few rows use `skinny_gemm`, and mixtures of experts
`expert_gemm`.

Timing a product alone is not enough: the operations fused with the product also count, and a step
may be bound by the host.  So steps are timed as served, compiled and back to back, with and
without the kernel, on the engine's own store.  All rows are padding, so nothing is written.

A step of a prompt takes seconds, and the host does not matter.  So a mixture of a prompt is timed
alone, and each rank times its own.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import mlx.nn as nn
import numpy as np

from vllm_metal_lite.attention.base import Attention, DeviceBatch
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import EMPTY_SLOT, PAD_SLOT, SegmentState
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.distributed import RankGroup
from vllm_metal_lite.fusion.context import NO_ROWS
from vllm_metal_lite.fusion.launches import FusedLaunches
from vllm_metal_lite.kernels import timing
from vllm_metal_lite.kernels.experts import MAX_ROWS as EXPERT_ROWS
from vllm_metal_lite.kernels.skinny_gemm import MAX_ROWS
from vllm_metal_lite.kernels.weight_formats import Weight, shape_of
from vllm_metal_lite.model.layer_weights import mixtures, product_weights
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.model.seam.hooks import building
from vllm_metal_lite.runner.compiled import CompiledSteps
from vllm_metal_lite.specs import ExpertShape

_ROUNDS = 5

# Steps of few rows

# The kernel gets the row counts from its first win in _FEWEST to its last win in _SIZES, which
# bisection finds.
_FEWEST = (1, 2, 4)
_SIZES = (8, 16, 32, MAX_ROWS)
# At most _ROUNDS chains of _STEPS steps, and fewer of both if a candidate would take longer than
# _MAX_SECONDS in all.  A Mac may need 100 ms a step.
_STEPS, _MAX_SECONDS = 20, 0.24

# Mixtures of a prompt

# Rows, and the experts of each row, as in gpt-oss and GLM; fewer rounds if a candidate would take
# longer than _PROMPT_SECONDS in all.
_PROMPT_ROWS, _TOP_K, _PROMPT_SECONDS = 512, 4, 0.75


def faster_rows(
    packed: PackedModel, attention: Attention, fusion: FusedLaunches, ranks: RankGroup
) -> range:
    """The row counts in `fusion.skinny_rows` at which `skinny_gemm` speeds up this model.

    Measured once for each set of weight shapes, then remembered.  If timing fails, MLX's products
    are used, with a warning.  ranks: the leader's timing counts, since all must run the same steps.
    """
    dtype = packed.layout.dtype  # the kernel was checked with rows of this type
    weights = [w for w in product_weights(packed.model) if w.dtype is None or w.dtype == dtype]
    steps = _Steps(packed, attention, fusion, replace(fusion, skinny_rows=NO_ROWS), ranks)
    weight_types = [_weight_type(weight) for weight in weights]
    return steps.winning_rows("skinny_gemm", "products of few rows", weight_types)


def faster_expert_rows(
    packed: PackedModel, attention: Attention, fusion: FusedLaunches, ranks: RankGroup
) -> range:
    """The same for `fusion.expert_rows` and the kernels of mixtures of experts.

    Steps of more rows are prompts, which are timed if the kernels win up to there.
    """
    steps = _Steps(packed, attention, fusion, replace(fusion, expert_rows=NO_ROWS), ranks)
    weight_types = [
        f"{experts.count} experts of {_weight_type(experts.gate.weight)}"
        for _, experts in mixtures(packed.model)
    ]
    rows = steps.winning_rows("expert_gemm", "mixtures of experts of few rows", weight_types)
    if rows.stop > _SIZES[-1] and all(ranks.gather(_faster_prompts(packed))):
        return range(rows.start, fusion.expert_rows.stop)
    return rows


def _weight_type(weight: Weight) -> str:
    outputs, depth, how = shape_of(weight)
    return f"{how or weight.dtype} {(outputs, depth)}"


@dataclass(frozen=True)
class _Steps:
    """Steps of a model to be timed, with a kernel and by MLX."""

    packed: PackedModel
    attention: Attention
    by_kernel: FusedLaunches
    by_mlx: FusedLaunches
    ranks: RankGroup

    def winning_rows(self, kernel: str, what: str, weight_types: Sequence[str]) -> range:
        """The row counts at which the kernel wins, measured once for models with these weights.

        what: the name of its work in messages.  weight_types: the types of the weights that it
        reads.
        """
        # A stage without such weights takes part: its forward is a part of each step.
        counts = sorted(Counter(chain(*self.ranks.gather([*weight_types]))).items())
        # Uncompiled steps are bound by the host.  On a CPU, kernels run only in tests, where timing
        # means nothing.
        if not counts or CompiledSteps(self.packed, self.attention).reason is not None:
            return NO_ROWS
        key = "steps with " + ", ".join(f"{n} x {weight}" for weight, n in counts)

        def measure() -> str:
            rows = self._search()
            return f"{rows.start} {rows.stop}"

        known = timing.timed_once(key, kernel, f"{what} with this model", measure, self.ranks)
        return range(*map(int, known.split())) if known else NO_ROWS

    def _search(self) -> range:
        """The rows from the fewest to the most at which the kernel wins.  It computes eight rows at
        once, so MLX's products may win with fewer.  Bisection, because each of the larger sizes
        compiles instantiations of the kernel."""

        def loses(num_rows: int) -> bool:
            by_kernel, by_mlx = self.seconds(num_rows)
            return by_kernel >= by_mlx

        first = next((count for count in _FEWEST if not loses(count)), None)
        wins = bisect_left(_SIZES, True, key=loses)
        if wins:
            return range(first or _SIZES[0], _SIZES[wins - 1] + 1)
        return NO_ROWS if first is None else range(first, first + 1)

    def seconds(self, num_rows: int) -> list[float]:
        """Seconds per step with the kernel and by MLX."""
        step = _padding(self.attention, num_rows, self.packed.layout.vocab_size)
        candidates = [self._back_to_back(fusion, step) for fusion in (self.by_kernel, self.by_mlx)]
        return timing.seconds_alternating(
            candidates, rounds=_ROUNDS, calls=_STEPS, enough=_MAX_SECONDS, ranks=self.ranks
        )

    def _back_to_back(self, fusion: FusedLaunches, step: DeviceBatch) -> timing.Candidate:
        """The same step again and again, compiled, each submitted while the previous one runs."""
        forward = CompiledSteps(self.packed, self.attention, fusion)
        state = self.attention.new_state()

        def run(count: int) -> None:
            nonlocal state
            for _ in range(count):
                result = forward(step, state)
                if result is None:
                    raise RuntimeError(forward.reason)
                logits, _, state = result
                mx.async_eval(logits, state)
            mx.eval(logits, state)

        return run


def _padding(attention: Attention, num_rows: int, vocab_size: int) -> DeviceBatch:
    """A step of decodes that write no rows and no states, and see no keys.

    The tokens differ, so that their experts do.  The rows count as live, so that experts are read.
    """
    store = attention.store
    inputs = InputBatch(num_rows, 1, store.block_size, len(store.num_blocks))
    rows = np.array([inputs.add([n % vocab_size], 1) for n in range(num_rows)])
    no_states = [SegmentState(EMPTY_SLOT, EMPTY_SLOT)] * num_rows
    batch = inputs.pack(rows, np.zeros_like(rows), np.ones_like(rows), no_states)
    step = attention.prepare(batch, num_rows)
    nowhere = tuple(mx.full(slots.shape, PAD_SLOT, mx.int32) for slots in step.slot_mapping)
    plan = step.plan
    if plan.decodes is not None:
        no_keys = mx.zeros_like(plan.decodes.seq_lens)
        plan = plan._replace(decodes=plan.decodes._replace(seq_lens=no_keys))
    return step._replace(slot_mapping=nowhere, plan=plan)


def _faster_prompts(packed: PackedModel) -> bool:
    """Whether each of the model's mixtures of experts takes a prompt faster by the kernels.

    Measured once for each type of a mixture, then remembered.  If timing fails, mlx-lm's code
    serves prompts, with a warning.
    """
    layers: dict[ExpertShape, nn.Module] = {}
    for layer, experts in mixtures(packed.model):
        layers.setdefault(experts.shape, layer)
    dtype = packed.layout.dtype
    return all(_faster_prompt(layer, shape, dtype) for shape, layer in layers.items())


def _faster_prompt(layer: nn.Module, shape: ExpertShape, dtype: mx.Dtype) -> bool:
    def measure() -> str:
        by_kernels, by_mlx = _mixture_seconds(layer, shape, dtype)
        return "faster" if by_kernels < by_mlx else "slower"

    key = f"prompts with {shape!r}, {dtype}"
    return timing.timed_once(key, "expert_gemm", "experts of prompts", measure) == "faster"


def _mixture_seconds(layer: nn.Module, shape: ExpertShape, dtype: mx.Dtype) -> list[float]:
    """Seconds of a mixture and its weighted sum, with the kernels and without."""
    rng, top_k = np.random.default_rng(0), min(_TOP_K, shape.experts)
    chosen = rng.random((1, _PROMPT_ROWS, shape.experts)).argpartition(top_k - 1)[..., :top_k]
    indices, weights = mx.array(chosen.astype(np.uint32)), mx.full(chosen.shape, 1 / top_k)
    x = mx.random.normal((1, _PROMPT_ROWS, shape.hidden), dtype)
    mx.eval(x, indices, weights)

    def candidate(rows: range) -> timing.Candidate:
        fusion = FusedLaunches(expert_rows=rows)

        def run(count: int) -> None:
            for _ in range(count):
                with building(), fusion.building(None):
                    summed = (layer(x, indices) * weights[..., None]).sum(axis=-2)
                mx.eval(summed)

        return run

    candidates = [candidate(range(1, EXPERT_ROWS + 1)), candidate(NO_ROWS)]
    return timing.seconds_alternating(candidates, rounds=_ROUNDS, enough=_PROMPT_SECONDS, warm=1)
