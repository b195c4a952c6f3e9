"""Assembles an engine's parts, and a runner for the vLLM plugin, on this device.

This file alone brings the optional rooms to the core.  A room that is not installed is left out:
without `checks` the kernels are trusted, without `fusion` nothing is fused, without `prefix_disk`
nothing is kept on the disk, and without `images` no model sees.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import NamedTuple

from vllm_metal_lite import backend
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.attention.select import no_kernels, select
from vllm_metal_lite.config import MAX_MODEL_DRAFTS, EngineConfig
from vllm_metal_lite.kernels.launch import KernelError
from vllm_metal_lite.kernels.registry import Verdict
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.model.packed import Mode
from vllm_metal_lite.runner.memory import size_store
from vllm_metal_lite.runner.pictures import NoEyes
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.runner.step_path import StepPath
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.scheduler.no_prefix_disk import NoPrefixDisk
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.step_limit import StepLimit

logger = logging.getLogger(__name__)


class Parts(NamedTuple):
    """The parts of an engine that depend on the device and on the rooms that are installed."""

    scheduler: Scheduler
    runner: ModelRunner
    prefix_disk: NoPrefixDisk
    eyes: NoEyes = NoEyes("this engine takes no pictures")


def assemble(model: LoadedModel, config: EngineConfig) -> Parts:
    """Size the store, and build the parts around it.  Raises OutOfMemoryError and ConfigError."""
    logger.info("building the engine", extra={"transient": True})
    eyes = _eyes(model, config)
    held = replace(model, weight_bytes=model.weight_bytes + eyes.num_bytes)
    groups, max_model_len, num_state_slots = size_store(held, config, picture_peak=eyes.peak_bytes)
    backend.set_memory_limits()
    states = model.packed.state_store(num_state_slots)
    store = PagedStore(model.kv_specs, groups, config.block_size, states=states)
    limit = None
    if config.max_step_seconds and model.ranks.size == 1:  # each rank would measure other times
        limit = StepLimit(config.max_step_seconds, not backend.is_cpu())
    scheduler = Scheduler(
        config,
        groups,
        max_model_len,
        num_state_slots=num_state_slots,
        # A module that sees sequences is called, and reads its weights, once for each state.
        max_draft_states=MAX_MODEL_DRAFTS if model.packed.mode is Mode.PACKED else 1,
        # The disk needs the scheduler, which asks the disk only when it admits a request.
        must_wait=lambda request, hit: prefix_disk.must_wait(request, hit),
        limit=limit,
    )
    # Before fusion, which changes the weights that identify the model to the folder.
    prefix_disk = _prefix_disk(model, scheduler, store, eyes)
    sampler = Sampler(config.max_num_seqs, model.vocab_size)
    runner = build_runner(model, store, sampler, config.attention)
    return Parts(scheduler, runner, prefix_disk, eyes)


def _eyes(model: LoadedModel, config: EngineConfig) -> NoEyes:
    """The model's vision tower, with its weights."""
    with _if_installed("images"):
        from vllm_metal_lite.images.eyes import attach

        return attach(model, config.limit_mm_per_prompt["image"])
    return NoEyes("this installation takes no pictures")


def _prefix_disk(
    model: LoadedModel, scheduler: Scheduler, store: PagedStore, eyes: NoEyes
) -> NoPrefixDisk:
    config = scheduler.config
    if config.enable_prefix_caching and config.prefix_disk_gib > 0:
        with _if_installed("prefix_disk"):
            from vllm_metal_lite.prefix_disk.disk import attach

            return attach(model, scheduler, store, eyes) or NoPrefixDisk()
    return NoPrefixDisk()


def build_runner(
    model: LoadedModel, store: PagedStore, sampler: Sampler, attention_option: str
) -> ModelRunner:
    """Choose a model's attention and fusion on this device.

    attention_option: "auto", "kernels" or "reference", see `attention.select`.
    """
    path = choose_attention(model, store, attention_option)
    with _if_installed("fusion"):
        from vllm_metal_lite.fusion.decide import decide

        is_decided = False
        while not is_decided:
            try:
                fusion = decide(model.packed, path.attention, model.ranks)
                path, is_decided = replace(path, fusion=fusion), True
            except KernelError as e:  # in the trial of the fused launches
                path = path.fallback(e)
    drafting = model.drafter.packed if model.drafter else None
    return ModelRunner(model.packed, path, sampler, model.ranks, drafting)


def choose_attention(model: LoadedModel, store: PagedStore, option: str) -> StepPath:
    """The path of a model on this device; nothing is fused yet."""
    shapes, verdict = model.attention_shapes, Verdict({})
    own = no_kernels(option, shapes, model.packed.by_segment, model.usage.recurrences)
    # Layers of another stage may attend otherwise; all stages take one path.
    reason = next((r for r in model.ranks.gather(own) if r is not None), None)
    if reason is not None:
        return StepPath(ReferenceAttention(store), reason, option, shapes)
    with _if_installed("checks"):
        from vllm_metal_lite.checks.verdicts import verify

        for rank in range(model.ranks.size):  # one after another: ranks may share a device
            if rank == model.ranks.rank:
                verdict = verify(model.kernel_use(store.block_size))
            model.ranks.gather(rank)  # until this one is done
        found = model.ranks.gather(asdict(verdict))
        verdict = Verdict.of_all([Verdict(**fields) for fields in found])
    return StepPath(*select(option, store, shapes, verdict), option, shapes, verdict)


@contextmanager
def _if_installed(room: str) -> Iterator[None]:
    """Skip the work of an optional room that is not installed."""
    try:
        yield
    except ModuleNotFoundError as e:
        if e.name != f"vllm_metal_lite.{room}":
            raise
