"""Assembles a ModelRunner from a loaded model, for the engine and for the vLLM plugin.

The core runs without the packages on top of it: `checks` and `fusion` are optional.
"""

from dataclasses import asdict, replace
from importlib import import_module
from types import ModuleType

from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.attention.select import no_kernels, select
from vllm_metal_lite.kernels.launch import KernelError
from vllm_metal_lite.kernels.registry import Verdict
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.runner.step_path import StepPath
from vllm_metal_lite.sampling.sampler import Sampler


def build_runner(
    model: LoadedModel, store: PagedStore, sampler: Sampler, attention_option: str
) -> ModelRunner:
    """Choose a model's attention and fusion on this device.

    attention_option: "auto", "kernels" or "reference", see `attention.select`.
    """
    path = choose_attention(model, store, attention_option)
    fusing = optional_module("fusion.decide")
    while fusing is not None:
        try:
            fusion = fusing.decide(model.packed, path.attention, model.ranks)
            path = replace(path, fusion=fusion)
            break
        except KernelError as e:  # in the trial of the fused launches
            path = path.fallback(e)
    return ModelRunner(model.packed, path, sampler, model.ranks)


def choose_attention(model: LoadedModel, store: PagedStore, option: str) -> StepPath:
    """The path of a model on this device; nothing is fused yet."""
    shapes, verdict = model.attention_shapes, Verdict({})
    own = no_kernels(option, shapes, model.packed.by_segment, model.usage.recurrences)
    # Layers of another stage may attend otherwise; all stages take one path.
    reason = next((r for r in model.ranks.gather(own) if r is not None), None)
    if reason is not None:
        return StepPath(ReferenceAttention(store), reason, option, shapes)
    if checks := optional_module("checks.verdicts"):
        verdict = _verdict_of_ranks(checks, model, store.block_size)
    return StepPath(*select(option, store, shapes, verdict), option, shapes, verdict)


def _verdict_of_ranks(checks: ModuleType, model: LoadedModel, block_size: int) -> Verdict:
    """The verdict of a model's ranks, which check one after another: they may share a device."""
    own = Verdict({})
    for rank in range(model.ranks.size):
        if rank == model.ranks.rank:
            own = checks.verify(model.kernel_use(block_size))
        model.ranks.gather(rank)  # until this one is done
    return Verdict.of_all([Verdict(**found) for found in model.ranks.gather(asdict(own))])


def optional_module(name: str) -> ModuleType | None:
    """A module of an optional package; None if the package is not installed."""
    package = f"vllm_metal_lite.{name.partition('.')[0]}"
    try:
        return import_module(f"vllm_metal_lite.{name}")
    except ModuleNotFoundError as e:
        if e.name != package:
            raise
        return None
