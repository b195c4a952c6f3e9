"""Assembles a ModelRunner from a loaded model, for both front doors.

The core runs without the packages on top of it: `checks` and `fusion` are optional.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import ModuleType

from vllm_metal_lite.attention.base import Attention
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.attention.select import Verdict, no_kernels, select
from vllm_metal_lite.errors import ConfigError, Option
from vllm_metal_lite.kernels.launch import KernelError
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.packed import NO_FUSION, Fusion
from vllm_metal_lite.runner.path import Path
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.specs import AttentionShape

logger = logging.getLogger(__name__)


def build_runner(
    model: LoadedModel, store: PagedStore, sampler: Sampler, attention_option: str
) -> ModelRunner:
    """Choose a model's attention and fusion on this device.

    attention_option: "auto", "kernels" or "reference", see `attention.select`.
    """
    attention, reason, verdict = choose_attention(model, store, attention_option)
    fusion, note = NO_FUSION, ""
    if room := _room("fusion.decide"):
        fusion, note = room.decide(model.packed, attention, tuple(verdict.failures))
    choice = _Choice(attention_option, model.attention_shapes, verdict, fusion, note)
    return ModelRunner(model.packed, choice.path(attention, reason), sampler)


def choose_attention(
    model: LoadedModel, store: PagedStore, option: str
) -> tuple[Attention, str, Verdict]:
    """The attention path, the reason, and the verdict on the kernels of this device."""
    shapes, verdict = model.attention_shapes, Verdict({})
    reason = no_kernels(option, shapes, model.packed.by_segment)
    if reason is not None:
        return ReferenceAttention(store), reason, verdict
    if room := _room("checks.verdicts"):
        verdict = room.verify(model.kernel_use(store.block_size))
    return *select(option, store, shapes, verdict), verdict


@dataclass(frozen=True)
class _Choice:
    """What a path was chosen from, for the next choice.  fusion_note: fusion's part of the reason.

    A kernel that fails in a step counts like one that fails its check.
    """

    option: str
    shapes: Sequence[AttentionShape]
    verdict: Verdict
    fusion: Fusion
    fusion_note: str

    def path(self, attention: Attention, reason: str) -> Path:
        uses_kernels = attention.name == "kernels"
        return Path(
            attention,
            self.fusion,
            reason + self.fusion_note,
            len(self.verdict.failures),
            partial(self._without, attention.store) if uses_kernels else None,
        )

    def _without(self, store: PagedStore, error: KernelError) -> Path:
        """The next best path.  Raises ConfigError if the option forbids it."""
        kernel, known = error.kernel, self.verdict.failures
        line = f"{kernel} fails in a step: {error.why}"
        verdict = replace(self.verdict, failures={**known, kernel: line})
        attention: Attention
        if kernel in known:  # the way without this kernel runs it too
            attention, reason = _no_kernels_left(self.option, store, line)
        else:
            attention, reason = select(self.option, store, self.shapes, verdict, known)
        fusion = NO_FUSION
        if attention.name == "kernels" and self.fusion is not NO_FUSION:
            fused = import_module("vllm_metal_lite.fusion.fused")
            fusion = fused.without(self.fusion, verdict.failures)
        note = "" if fusion is NO_FUSION or kernel == "skinny_gemm" else self.fusion_note
        choice = replace(self, verdict=verdict, fusion=fusion, fusion_note=note)
        return choice.path(attention, reason)


def _no_kernels_left(option: str, store: PagedStore, line: str) -> tuple[Attention, str]:
    """`select` where a kernel fails and is still used."""
    if option == "kernels":
        raise ConfigError(Option("attention"), f"='kernels' is not possible: {line}")
    logger.warning(f"{line}; using the reference attention, which is slower")
    return ReferenceAttention(store), line


def _room(name: str) -> ModuleType | None:
    """A module of an optional package; None if the package is not installed."""
    package = f"vllm_metal_lite.{name.partition('.')[0]}"
    try:
        return import_module(f"vllm_metal_lite.{name}")
    except ModuleNotFoundError as e:
        if e.name != package:
            raise
        return None
