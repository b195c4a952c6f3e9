"""Whether products of few rows go through `skinny_gemm`: found out by timing steps of the model.

A product by itself does not tell: the time of a step depends on what is fused with the product too,
and on whether the host or the device is waited for.  So steps are timed as they are served,
compiled and one behind the other, with the kernel and without, on the engine's own store.  All
their rows are padding, which kernels write nowhere.
"""

import logging
import time
from collections import Counter
from dataclasses import replace

import mlx.nn as nn
import numpy as np

from vllm_metal_lite.attention.base import Attention, Step
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import PAD_SLOT
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.errors import one_line
from vllm_metal_lite.fusion.fused import FusedLaunches
from vllm_metal_lite.kernels.remembered import Remembered
from vllm_metal_lite.kernels.skinny_gemm import MAX_ROWS, suits
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.runner.compiled import CompiledSteps

logger = logging.getLogger(__name__)

# Rows of the steps that are timed, and one row.
_SIZES = (8, 16, 32, MAX_ROWS)
# Of each size and way the median of so many chains of so many steps, or of fewer if that would take
# longer than so many seconds: a Mac may need 100 ms a step.
_CHAINS, _STEPS, _ENOUGH = 5, 20, 0.5

NONE = range(0)


def faster_rows(packed: PackedModel, attention: Attention, fusion: FusedLaunches) -> range:
    """The row counts, of `fusion.skinny_rows`, with which `skinny_gemm` speeds up this model.

    Measured once for a model's weights, then remembered.  If that fails, MLX's products are used,
    with a warning.
    """
    dtypes = {spec.dtype for spec in packed.attention_specs}  # the kernel was checked with these
    weights = [w for w in _linear_weights(packed.model) if suits(w) and w.dtype in dtypes]
    # Uncompiled steps wait for the host; on a CPU kernels run in tests only, where time means
    # nothing.
    if not weights or CompiledSteps(packed, attention).reason is not None:
        return NONE
    found, counts = Remembered(), Counter(f"{w.dtype} {w.shape}" for w in weights)
    key = "steps with " + ", ".join(f"{n} x {weight}" for weight, n in sorted(counts.items()))
    if key not in found.known:
        try:
            rows = _measure(packed, attention, fusion)
        except Exception as e:  # whatever a compiler or a driver says; the next start may succeed
            logger.warning(f"skinny_gemm cannot be timed, and is not used: {one_line(e)}")
            return NONE
        found.add(key, f"{rows.start} {rows.stop}")
    return range(*map(int, found.known[key].split()))


def _linear_weights(model: nn.Module) -> list[mx.array]:
    """Of its linear layers that are neither quantised nor biased, (outputs, inputs) each."""
    modules = (m for _, m in model.named_modules() if isinstance(m, nn.Linear))
    return [m["weight"] for m in modules if "bias" not in m]


def _measure(packed: PackedModel, attention: Attention, fusion: FusedLaunches) -> range:
    """From one row, or from two, to the largest size until which the kernel always wins."""

    def wins(num_rows: int) -> bool:
        by_kernel, by_mlx = _seconds(packed, attention, fusion, num_rows)
        return by_kernel < by_mlx

    most = 1
    first = 1 if wins(1) else 2
    for size in _SIZES:
        if not wins(size):
            break
        most = size
    return range(first, most + 1)


def _seconds(
    packed: PackedModel, attention: Attention, fusion: FusedLaunches, num_rows: int
) -> tuple[float, float]:
    """What a step takes by the kernel, and by MLX's products; in turns, for clocks drift."""
    step = _padding(attention, num_rows)
    ways = [
        _Steps(CompiledSteps(packed, attention, way), step, attention.new_state())
        for way in (fusion, replace(fusion, skinny_rows=NONE))
    ]
    for way in ways:
        way.seconds(2)  # these trace, compile and capture
    once = max(way.seconds(1) for way in ways)
    chains = max(1, min(_CHAINS, int(_ENOUGH / once)))
    steps = max(1, min(_STEPS, int(_ENOUGH / once / chains)))
    by_kernel, by_mlx = np.median([[w.seconds(steps) for w in ways] for _ in range(chains)], axis=0)
    return by_kernel, by_mlx


class _Steps:
    """The same step again and again, compiled."""

    def __init__(self, forward: CompiledSteps, step: Step, state: list[mx.array]) -> None:
        self.forward, self.step, self.state = forward, step, state

    def seconds(self, count: int) -> float:
        """What one of `count` takes, each submitted while the previous one runs."""
        start = time.perf_counter()
        for _ in range(count):
            result = self.forward(self.step, self.state)
            if result is None:
                raise RuntimeError(self.forward.reason)
            logits, self.state = result
            mx.async_eval(logits, self.state)
        mx.eval(logits, self.state)
        return (time.perf_counter() - start) / count


def _padding(attention: Attention, num_rows: int) -> Step:
    """A step of decodes whose rows are written nowhere, and see no key."""
    store = attention.store
    inputs = InputBatch(num_rows, 1, store.block_size, len(store.num_blocks))
    rows = np.array([inputs.add([0], 1) for _ in range(num_rows)])
    batch = inputs.pack(rows, np.zeros_like(rows), np.ones_like(rows))
    step = attention.prepare(batch, num_rows)
    nowhere = tuple(mx.full(slots.shape, PAD_SLOT, mx.int32) for slots in step.slot_mapping)
    plan = replace(step.plan, seq_lens=mx.zeros_like(step.plan.seq_lens))
    return replace(step, slot_mapping=nowhere, plan=plan)
