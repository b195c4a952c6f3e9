"""Assembles a ModelRunner from a loaded model, for both front doors.

The core runs without the packages on top of it: `checks` and `fusion` are optional.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from vllm_metal_lite.attention.base import Attention
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.attention.select import Verdict, no_kernels, select
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.packed import NO_FUSION, Fusion
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.sampling.sampler import Sampler


@dataclass(frozen=True)
class Assembly:
    """attention_reason: why this attention path was chosen and which operations are fused."""

    runner: ModelRunner
    attention_reason: str


def build_runner(
    model: LoadedModel, store: PagedStore, sampler: Sampler, attention_option: str
) -> Assembly:
    """Choose a model's attention and fusion on this device.

    attention_option: "auto", "kernels" or "reference", see `attention.select`.
    """
    attention, reason, wrong = choose_attention(model, store, attention_option)
    fusion: Fusion = NO_FUSION
    if room := _room("fusion.decide"):
        fusion, note = room.decide(model.packed, attention, wrong)
        reason += note
    return Assembly(ModelRunner(model.packed, attention, sampler, fusion), reason)


def choose_attention(
    model: LoadedModel, store: PagedStore, option: str
) -> tuple[Attention, str, Sequence[str]]:
    """The attention path, the reason, and the kernels that fail their check on this device."""
    shapes = model.attention_shapes
    reason = no_kernels(option, shapes, model.packed.by_segment)
    if reason is not None:
        return ReferenceAttention(store), reason, ()
    verdict = Verdict({})
    if room := _room("checks.verdicts"):
        verdict = room.verify(model.kernel_use(store.block_size))
    return *select(option, store, shapes, verdict), tuple(verdict.failures)


def _room(name: str) -> ModuleType | None:
    """A module of an optional package; None if the package is not installed."""
    package = f"vllm_metal_lite.{name.partition('.')[0]}"
    try:
        return import_module(f"vllm_metal_lite.{name}")
    except ModuleNotFoundError as e:
        if e.name != package:
            raise
        return None
