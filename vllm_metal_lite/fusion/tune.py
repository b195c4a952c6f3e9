"""Whether products of few rows go through `skinny_gemm`: found out by timing steps of the model.

A product by itself does not tell: what a step takes depends on what is fused with it too, and on
whether one waits for the device or for the host.  So steps are timed as they are served, compiled
and one behind the other, with the kernel and without, on the engine's own store.  All their rows
are padding, which kernels write nowhere.
"""

import time
import warnings
from collections import Counter

import numpy as np

from vllm_metal_lite.attention.base import Attention, StepMetadata
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import PAD_SLOT
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.checks.selfcheck import Memory
from vllm_metal_lite.errors import one_line
from vllm_metal_lite.kernels.skinny_gemm import MAX_ROWS, suits
from vllm_metal_lite.model.packed import PackedModel
from vllm_metal_lite.runner.compiled import CompiledSteps

# Rows of the steps that are timed, and one row.
_SIZES = (8, 16, 32, MAX_ROWS)
# Of each size and way the median of so many chains of so many steps, or of less if that would take
# longer than so many seconds: a Mac may need 100 ms a step.
_CHAINS, _STEPS, _ENOUGH = 5, 20, 0.5

_NONE = range(0)


def tune_products(packed: PackedModel, attention: Attention) -> str:
    """Leave in attention.skinny_rows, of all that may be, the numbers of rows with which steps of
    this model are faster by `skinny_gemm`; returns what the start-up line says of it.

    Measured once for a model's weights.  If that fails, MLX's products are used, with a warning.
    """
    if attention.skinny_rows:
        attention.skinny_rows = _faster_rows(packed, attention)
    rows = attention.skinny_rows
    if not rows:
        return ""
    count = "one row" if len(rows) == 1 else f"{rows[0]} to {rows[-1]} rows"
    return f"; products of {count} by skinny_gemm"


def _faster_rows(packed: PackedModel, attention: Attention) -> range:
    """As remembered, or measured now."""
    dtypes = {spec.dtype for spec in packed.attention_specs}  # the kernel was checked with these
    weights = [w for w in packed.linear_weights if suits(w) and w.dtype in dtypes]
    # Uncompiled steps wait for the host; on a CPU kernels run in tests only, where time means
    # nothing.
    if not weights or CompiledSteps(packed, attention).reason is not None:
        return _NONE
    memory, counts = Memory(), Counter(f"{w.dtype} {w.shape}" for w in weights)
    key = "steps with " + ", ".join(f"{n} x {weight}" for weight, n in sorted(counts.items()))
    if key not in memory.known:
        try:
            rows = _measure(packed, attention)
        except Exception as e:  # whatever a compiler or a driver says; it may go next time
            message = f"skinny_gemm cannot be timed, and is not used: {one_line(e)}"
            warnings.warn(message, stacklevel=3)
            return _NONE
        memory.add(key, f"{rows.start} {rows.stop}")
    return range(*map(int, memory.known[key].split()))


def _measure(packed: PackedModel, attention: Attention) -> range:
    """From one row, or from two, to the largest size until which the kernel always wins."""

    def wins(num_rows: int) -> bool:
        by_kernel, by_mlx = _seconds(packed, attention, num_rows)
        return by_kernel < by_mlx

    state, most = attention.state, 1
    try:
        first = 1 if wins(1) else 2
        for size in _SIZES:
            if not wins(size):
                break
            most = size
    finally:
        attention.state = state
    return range(first, most + 1)


def _seconds(packed: PackedModel, attention: Attention, num_rows: int) -> tuple[float, float]:
    """What a step takes by the kernel, and by MLX's products; in turns, for clocks drift."""
    step = _padding(attention, num_rows)
    ways = [_Steps(packed, attention, step, rows) for rows in (attention.skinny_rows, _NONE)]
    for way in ways:
        way.seconds(2)  # these trace, compile and capture
    once = max(way.seconds(1) for way in ways)
    chains = max(1, min(_CHAINS, int(_ENOUGH / once)))
    steps = max(1, min(_STEPS, int(_ENOUGH / once / chains)))
    by_kernel, by_mlx = np.median([[w.seconds(steps) for w in ways] for _ in range(chains)], axis=0)
    return by_kernel, by_mlx


class _Steps:
    """Steps that are alike, compiled for products of skinny_rows by the kernel."""

    def __init__(
        self, packed: PackedModel, attention: Attention, step: StepMetadata, skinny_rows: range
    ) -> None:
        self.attention, self.step, self.skinny_rows = attention, step, skinny_rows
        self.forward = CompiledSteps(packed, attention)

    def seconds(self, count: int) -> float:
        """What one of `count` takes, each submitted while the one before it runs."""
        attention, allowed = self.attention, self.attention.skinny_rows
        attention.skinny_rows = self.skinny_rows
        start = time.perf_counter()
        try:
            for _ in range(count):
                logits = self.forward(self.step)
                if logits is None:
                    raise RuntimeError(self.forward.reason)
                mx.async_eval(logits, attention.state)
            mx.eval(logits, attention.state)
        finally:
            attention.skinny_rows = allowed
        return (time.perf_counter() - start) / count


def _padding(attention: Attention, num_rows: int) -> StepMetadata:
    """A step of decodes whose rows are written nowhere, and see no key."""
    store = attention.store
    inputs = InputBatch(num_rows, 1, store.block_size, len(store.num_blocks))
    rows = np.array([inputs.add([0], 1) for _ in range(num_rows)])
    batch = inputs.pack(rows, np.zeros_like(rows), np.ones_like(rows))
    step = attention.prepare(batch, num_rows)
    step.seq_lens = mx.zeros_like(step.seq_lens)
    step.slot_mapping = [mx.full(slots.shape, PAD_SLOT, mx.int32) for slots in step.slot_mapping]
    return step
