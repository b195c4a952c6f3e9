"""The SDPA calls that cover a step, on the device."""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from vllm_metal_lite import backend
from vllm_metal_lite.attention.base import AttentionCall
from vllm_metal_lite.attention.sdpa.fused import Unfused
from vllm_metal_lite.attention.sdpa.gathers import Joined, joint_gathers
from vllm_metal_lite.attention.sdpa.planner import CallPlanner, HostCall, places
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.devices import profile


def on_device(array: np.ndarray | None) -> mx.array | None:
    return None if array is None else mx.array(array)


class DeviceCall:
    """One SDPA call on the device, with masks that are built when they are needed.

    host: the call on the host.
    """

    def __init__(self, host: HostCall, window: int | None) -> None:
        self.host, self.window = host, window
        self._masks: dict[mx.Dtype, mx.array] = {}

    def mask(self, dtype: mx.Dtype) -> mx.array | str | None:
        """The mask as MLX's SDPA takes it.  An array is (B, 1, Lq, Lk) of bool, or, on CUDA, which
        fuses no bool mask, additive in the queries' dtype."""
        if self.host.mask != "array":
            return self.host.mask
        key = dtype if backend.name() == "cuda" else mx.bool_
        if key not in self._masks:
            mask = self._visible(0)
            if key != mx.bool_:
                mask = mx.where(mask, mx.array(0, dtype), mx.array(-float("inf"), dtype))
            self._masks[key] = mask
        return self._masks[key]

    @cached_property
    def visible(self) -> mx.array:
        """Bool (B, 1, Lq, Lk - num_visible): whether rows see keys after num_visible."""
        return self._visible(self.host.num_visible)

    def _visible(self, first: int) -> mx.array:
        q_pos, kv_pos = mx.array(self.host.q_pos)[:, :, None], mx.array(self.host.kv_pos)[:, None]
        kv_pos, segments = kv_pos[..., first:], on_device(self.host.segments)
        visible = kv_pos <= q_pos
        if self.window is not None:
            visible = visible & (kv_pos > q_pos - self.window)
        if segments is not None:
            visible = visible & (segments[:, :, None] == segments[:, None, first:])
        return visible[:, None]


class StepCalls:
    """The SDPA calls that cover a step, with their input and output rows.

    q_rows: (T,) rows of the packed batch in the order of the calls; None: the first T.
    place: (num_rows,) the place of each row in the calls' concatenated outputs; None: in order.
    gathers: the slots (K,) of each gather, and how its rows are cut into calls.
    """

    def __init__(self, planned: list[HostCall], window: int | None, num_rows: int) -> None:
        self.calls = [DeviceCall(call, window) for call in planned]
        self.q_rows, self.place = map(on_device, places(planned, num_rows))
        self.queries = Joined([call.q_pos.shape for call in planned])
        self.gathers, shapes = [], iter([call.kv_slots.shape for call in planned])
        for slots, begins in joint_gathers(planned, profile().max_gathered_keys):
            cut = Joined([next(shapes) for _ in begins], begins)
            self.gathers.append((mx.array(slots), cut))


class WholePrompt(NamedTuple):
    """One prompt from its first token on: one "causal" call, whose shapes repeat.

    slots: (num_rows,) int32 per KV group.  Padding repeats the first slot; no real row sees it.
    """

    slots: tuple[mx.array, ...]
    repeats: bool = True


class SdpaPlan:
    """A batch cut into SDPA calls, once per step for each KV group, window and attention chunk.

    Its calls differ between steps, so such a step is never compiled.
    """

    repeats = False

    def __init__(self, batch: ForwardBatch, num_rows: int) -> None:
        self.batch, self.num_rows = batch, num_rows
        self._plans: dict[tuple, StepCalls] = {}

    def step_calls(self, kv_group: int, call: AttentionCall, unfused: Unfused | None) -> StepCalls:
        """unfused: which calls of the layer MLX does not fuse; None: MLX fuses all."""
        longest = int(self.batch.seq_lens.max())
        window, chunk = (
            None if limit is not None and limit >= longest else limit
            for limit in (call.scores.window, call.attention_chunk)
        )
        key = kv_group, window, chunk, unfused
        if key not in self._plans:
            planned = CallPlanner(self.batch, *key).calls()
            self._plans[key] = StepCalls(planned, window, self.num_rows)
        return self._plans[key]
