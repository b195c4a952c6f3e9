"""Keeps cached prefixes of an engine on the disk; requests get them through the cache in memory.

A prefix is written at its second use; the prefix before the first checkpoint that a caller names is
written at its first.  Eviction writes nothing: most blocks were used once, and writes that nobody
reads wear a disk.
"""

import logging
from contextlib import closing

from vllm_metal_lite import backend, envs
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import one_line, size_text
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.prefix_disk.block_bytes import BlockBytes
from vllm_metal_lite.prefix_disk.folder import Folder
from vllm_metal_lite.prefix_disk.namespace import namespace
from vllm_metal_lite.prefix_disk.parts import Parts
from vllm_metal_lite.prefix_disk.reader import DiskReader
from vllm_metal_lite.prefix_disk.writer import DiskWriter
from vllm_metal_lite.runner.pictures import NoEyes
from vllm_metal_lite.scheduler.kv_manager import PrefixHit
from vllm_metal_lite.scheduler.no_prefix_disk import NoPrefixDisk
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)


def attach(
    model: LoadedModel, scheduler: Scheduler, store: PagedStore, eyes: NoEyes
) -> "PrefixDisk | None":
    """The prefix disk of a new engine, in this user's folder.

    None, with a warning, on CUDA and if the folder cannot be used.
    """
    config, path = scheduler.config, envs.prefix_folder()
    if backend.name() == "cuda":
        logger.warning("prefixes are not kept on the disk: the host cannot read a CUDA device")
        return None
    try:
        logger.info("identifying the weights for the prefix disk", extra={"transient": True})
        groups, size = scheduler.kv.groups, config.block_size
        digest = namespace(model, groups, size, config.attention, eyes)
        folder = Folder(path, int(config.prefix_disk_gib * 2**30), model.name)
    except Exception as e:  # a read-only or broken folder must not keep a model from serving
        logger.warning(f"prefixes are not kept on the disk: {path}: {one_line(e)}")
        return None
    return PrefixDisk(folder, digest, scheduler, store)


class PrefixDisk(NoPrefixDisk):
    """Restores and keeps the prefixes of one engine, whose thread calls it."""

    def __init__(
        self, folder: Folder, digest: bytes, scheduler: Scheduler, store: PagedStore
    ) -> None:
        self.folder = folder
        self.blocks = BlockBytes(store)
        self.parts = Parts(scheduler.kv, digest, self.blocks.sizes)
        self.writer = DiskWriter(self.folder, self.parts, self.blocks)
        self.reader = DiskReader(self.folder, self.parts, self.blocks, scheduler)
        self.description = f"kept in {folder.path}, at most {size_text(folder.quota)}"

    def must_wait(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a request waits for a read from the disk.  hit: its prefix in memory."""
        if request not in self.reader.waits:
            self.writer.refresh()
            self.reader.decide(request, hit)
        return self.reader.waits[request]

    def restored_tokens(self, request: Request) -> int:
        """How many tokens of a request's cached prefix came from the disk."""
        return min(self.reader.restored.get(request, 0), request.num_cached_tokens)

    def step_finished(self, output: SchedulerOutput) -> None:
        """Learn from a completed step: which prefixes are used again, and how fast it was."""
        self.reader.speeds.add_step(output)
        for segment in output.segments[output.num_decodes :]:
            request, start = segment.request, segment.num_computed
            if self.parts.kv.may_name(request):
                if request in output.admitted and not request.num_computed_before:
                    self.writer.add(self.parts.kv.block_names(request, start))
                for at in request.checkpoint_positions[:1]:
                    if start < at <= segment.end:
                        self.writer.add(self.parts.kv.block_names(request, at))

    @property
    def has_copies(self) -> bool:
        """Whether `between_steps` has something to do."""
        return self.reader.is_ready or self.writer.is_ready

    def between_steps(self) -> None:
        """Copy blocks from and to the store.  No step is in flight."""
        try:
            if self.has_copies:
                mx.synchronize()
                with closing(self.blocks):
                    if self.writer.is_ready:
                        self.writer.copy()
                    self.reader.advance()
        except Exception as e:  # such as no memory for a copy: a cache may fail no request
            self.folder.warn(f"leaves out some prefixes: {one_line(e)}")
            self.writer.waiting.clear()
            self.reader.stop()

    def rest(self) -> bool:
        """Continue to copy while there are no requests; returns whether work is left."""
        self.writer.flush(0.05)
        self.between_steps()
        return bool(self.writer.waiting) or self.reader.restore is not None

    def wait(self) -> None:
        """Wait a moment for the disk, while there is no step to run."""
        self.reader.wait()

    def reset(self) -> None:
        """Neither read nor write until a restart, which finds the files again."""
        self.writer.waiting.clear()
        self.reader.stop()
        self.parts.is_off = True

    def metrics(self) -> dict[str, int]:
        return {
            "prefix_disk_restored_tokens": self.reader.num_tokens,
            "prefix_disk_written_bytes": self.writer.num_bytes,
            "prefix_disk_errors": self.folder.num_errors,
        }
