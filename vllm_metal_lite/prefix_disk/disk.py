"""The cached prefixes of an engine on the disk.

The disk only fills the cache in memory.  A waiting request whose prefix continues on the disk
stays in the queue, and others pass it.  Threads read the files; between two steps the blocks are
copied to the store and named.  Then the request is admitted with an ordinary hit.

Prefixes are written when they are used a second time; so is the prefix before the first checkpoint
that a caller names.  Between two steps a few blocks are copied; a thread writes them.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from vllm_metal_lite import backend, envs
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import ConfigError, one_line
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.prefix_disk.chain import Chain, Part
from vllm_metal_lite.prefix_disk.folder import Folder
from vllm_metal_lite.prefix_disk.namespace import namespace
from vllm_metal_lite.prefix_disk.restore import Data, Restore
from vllm_metal_lite.prefix_disk.writer import Writer
from vllm_metal_lite.runner.block_bytes import BlockBytes
from vllm_metal_lite.scheduler.checkpoints import last_position
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.kv_manager import PrefixHit
from vllm_metal_lite.scheduler.request import Request, RequestStatus
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

# Tokens below which a prefix is computed, and not written.
MIN_TOKENS = 256
# Bytes that are copied from the store between two steps.
_COPIED = 16 << 20
_READERS = 4
# Chains that wait to be copied; further ones are dropped.
_MOST_PENDING = 16
# Seconds that a request waits for the disk at most, beside what computing takes.
_PATIENCE = 10.0
# Assumed until measured, in bytes a second.
_READ_SPEED = 5e8


class _Wanted(NamedTuple):
    """parts: of the prefix, those in memory among them.  num_tokens: that the disk adds."""

    parts: list[Part]
    num_tokens: int


def open_disk(
    model: LoadedModel, groups: Sequence[KVGroup], config: EngineConfig
) -> "PrefixDisk | None":
    """The prefixes of a model in the folder of this user; None, with a warning, if the folder
    cannot be used, or on CUDA."""
    path = envs.prefix_folder()
    try:
        if backend.name() == "cuda":
            raise ConfigError("the host cannot reach K and V in the memory of a CUDA device")
        digest = namespace(model, groups, config.block_size)
        folder = Folder(path, int(config.prefix_disk_gib * 2**30))
        folder.enter_namespace(digest, model.name)
    except Exception as e:  # a read-only or broken folder must not keep a model from serving
        logger.warning(f"prefixes are not kept on the disk: {path}: {one_line(e)}")
        return None
    return PrefixDisk(folder, digest)


class PrefixDisk:
    """Restores and keeps the prefixes of one engine, whose thread calls it.

    num_restored_tokens: that requests did not compute because they were on the disk.
    """

    def __init__(self, folder: Folder, digest: bytes) -> None:
        self.folder, self.digest = folder, digest
        self.writer = Writer(folder)
        self._readers = ThreadPoolExecutor(_READERS, "prefix-disk-reader")
        self.min_tokens = MIN_TOKENS
        self.num_restored_tokens = 0
        self._restore: Restore | None = None
        self._asked = False  # whether some waiting request may want one
        self._pending: deque[tuple[list[bytes], deque[Part]]] = deque()
        self._read_speed = _READ_SPEED
        self._compute_speed: float | None = None  # tokens a second
        self._last_end = 0.0

    def attach(self, scheduler: Scheduler, store: PagedStore) -> None:
        """Serve the requests of a scheduler.  Called once, before all else."""
        self.scheduler, self.kv = scheduler, scheduler.kv
        self.bytes = BlockBytes(store)
        scheduler.holds = self.holds

    # Restore

    def holds(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a request waits for the disk.  hit: what it finds in memory."""
        if request.wants_restore is None:
            self.writer.refresh()
            request.wants_restore = self._wanted(request, hit) is not None
            self._asked |= request.wants_restore
        return request.wants_restore

    def _wanted(self, request: Request, hit: PrefixHit) -> _Wanted | None:
        """The prefix that a request should have from the disk; None if reading is not worth it."""
        size, known = self.kv.block_size, self.folder.known
        most = last_position(request.num_tokens, size) // size
        if request.skip_prefix_cache_read or not known or not most:
            return None
        chain = self.chain(request, most)
        length = chain.longest(known, hit.num_tokens // size)
        num_tokens = length * size - hit.num_tokens
        if num_tokens < self.min_tokens:
            return None
        parts = list(chain.parts(length))
        num_bytes = sum(self.bytes.size(p.group) for p in parts if chain.in_memory(p) is None)
        return _Wanted(parts, num_tokens) if self._is_faster(num_bytes, num_tokens) else None

    def _is_faster(self, num_bytes: int, num_tokens: int) -> bool:
        speed = self._compute_speed
        return speed is None or num_bytes / self._read_speed < num_tokens / speed

    def chain(self, request: Request, length: int) -> Chain:
        """The first `length` blocks of a request."""
        names = self.kv.block_names(request, length * self.kv.block_size)[:length]
        return Chain(self.kv, self.digest, names)

    def _start(self, request: Request) -> None:
        """Begin to read a request's prefix, if there is room for it."""
        wanted, kv = self._wanted(request, self.kv.find_prefix(request)), self.kv
        if wanted is not None:
            spare = self.scheduler.spare_blocks()
            if kv.states is not None:  # each empty seat has a slot in reserve
                empty = kv.states.num_seats - self.scheduler.num_running
                spare.append(kv.states.pool.num_available - empty)
            restore = Restore(request, self.chain(request, 0), wanted.num_tokens)
            if restore.take(wanted.parts, spare):
                restore.copy(self.bytes, self._read)
                self._restore = restore
        request.wants_restore = self._restore is not None

    def _read(self, key: bytes, num_bytes: int) -> Data:
        if num_bytes:
            return self._readers.submit(self.folder.read, key, num_bytes)
        empty: Data = Future()  # without attention layers, blocks only count tokens
        empty.set_result(memoryview(b""))
        return empty

    def _continue(self, restore: Restore) -> None:
        """Copy what has been read, and end the restore if it is done or must stop."""
        is_right = restore.copy(self.bytes, self._read)
        if is_right and restore.is_done:
            self._read_speed = restore.num_bytes / max(time.monotonic() - restore.begun, 1e-6)
            self.num_restored_tokens += restore.num_tokens
        if restore.is_done or not is_right or self._must_stop(restore):
            self._end(restore)

    def _must_stop(self, restore: Restore) -> bool:
        """Whether nobody wants it, it takes too long, or running requests may need the blocks."""
        is_wanted = restore.request.status is not RequestStatus.FINISHED
        computing = restore.num_tokens / (self._compute_speed or 1e3)
        is_late = time.monotonic() > restore.begun + computing + _PATIENCE
        return is_late or not is_wanted or self.kv.num_available < self.scheduler.num_running

    def _end(self, restore: Restore) -> None:
        restore.end()
        restore.request.wants_restore = False
        self._restore = None

    # Keep

    def note(self, output: SchedulerOutput) -> None:
        """Learn from a completed step: which prefixes are used again, and how fast it was."""
        now, size = time.monotonic(), self.kv.block_size
        rows = output.total_num_scheduled_tokens
        if rows >= self.min_tokens and rows > 2 * output.num_decodes:
            speed = rows / (now - max(output.launched_at, self._last_end) + 1e-6)
            before = self._compute_speed
            self._compute_speed = speed if before is None else 0.7 * before + 0.3 * speed
        self._last_end = now
        for segment in output.segments[output.num_decodes :]:
            request, start = segment.request, segment.num_computed
            if self.kv.may_name(request):
                if request in output.admitted and not request.num_computed_before:
                    self._keep(request, start // size)
                for at in request.checkpoint_positions[:1]:
                    if start < at <= segment.end:
                        self._keep(request, at // size)

    def _keep(self, request: Request, length: int) -> None:
        is_long = length and length * self.kv.block_size >= self.min_tokens
        if is_long and len(self._pending) < _MOST_PENDING:
            parts = list(self.chain(request, length).parts(length))
            self._pending.append(([part.key for part in parts], deque(parts)))

    def _copy_some(self) -> None:
        """Copy blocks of the first chain for the writer."""
        keys, parts = self._pending[0]
        chain, files, num_bytes = Chain(self.kv, self.digest, ()), [], 0
        waiting = self.writer.waiting()
        while parts and num_bytes < _COPIED:
            part = parts.popleft()
            place, size = chain.in_memory(part), self.bytes.size(part.group)
            is_kept = part.key in self.folder.known or part.key in waiting
            if place is not None and size and not is_kept:
                files.append((part.key, self.bytes.read(part.group, place)))
                num_bytes += size
        self.writer.add(keys, files)
        if not parts:
            self._pending.popleft()

    # Called by the engine

    @property
    def wants_a_pause(self) -> bool:
        """Whether `between_steps` has something to do."""
        if self._restore is not None:
            return self._restore.is_ready or self._must_stop(self._restore)
        return self._asked or (bool(self._pending) and self.writer.has_room)

    def between_steps(self) -> None:
        """Copy blocks from and to the store.  No step is in flight."""
        if not self.wants_a_pause:
            return
        mx.synchronize()
        if self._pending and self.writer.has_room:
            self._copy_some()
        if self._restore is not None:
            self._continue(self._restore)
        if self._restore is None and self._asked:
            request = next((r for r in self.scheduler.waiting if r.wants_restore), None)
            self._asked = request is not None
            if request is not None:
                self._start(request)
        self.bytes.close()

    def rest(self) -> bool:
        """Copy on while there are no requests; whether more is left."""
        if self._pending and not self.writer.has_room:
            self.writer.flush(0.05)
        self.between_steps()
        return bool(self._pending) or self._restore is not None

    def wait(self) -> None:
        """Wait a moment for the disk: there is no step to run meanwhile."""
        if self._restore is not None and self._restore.reads:
            with suppress(TimeoutError):
                self._restore.reads[0].data.exception(0.05)

    def reset(self) -> None:
        """Find nothing of what was kept so far, as the cache in memory does."""
        self._pending.clear()
        if self._restore is not None:
            self._end(self._restore)
        self.digest = os.urandom(16)  # what is on the disk waits for the next start

    def metrics(self) -> dict[str, int]:
        return {
            "prefix_disk_restored_tokens": self.num_restored_tokens,
            "prefix_disk_written_bytes": self.writer.num_bytes,
            "prefix_disk_errors": self.writer.num_errors + self.folder.num_bad,
        }

    def close(self) -> None:
        """Stop the threads; what is not written yet is lost."""
        if self._restore is not None:
            self._end(self._restore)
        self._readers.shutdown()
        self.writer.close()
        self.folder.close()
