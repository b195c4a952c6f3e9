"""The cached prefixes of an engine on the disk.

The disk only fills the cache in memory.  A waiting request whose prefix goes on on the disk stays
in the queue, and others pass it.  Threads read the files; between two steps the blocks are copied
to the store and named.  Then the request is admitted with an ordinary hit.

Written is what is used a second time, and the prefix before the first checkpoint that a caller
names.  Between two steps a few blocks are copied; a thread writes them.
"""

import logging
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from vllm_metal_lite import envs
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import one_line
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.prefix_disk.folder import Folder
from vllm_metal_lite.prefix_disk.namespace import namespace
from vllm_metal_lite.prefix_disk.plan import STATES, Chain, Part
from vllm_metal_lite.prefix_disk.writer import File, Writer
from vllm_metal_lite.runner.block_bytes import BlockBytes
from vllm_metal_lite.scheduler.block_pool import BlockPool
from vllm_metal_lite.scheduler.checkpoints import last_position
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.kv_manager import PrefixHit
from vllm_metal_lite.scheduler.request import Request, RequestStatus
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

# Tokens below which a prefix is computed.
MIN_TOKENS = 256
# Bytes that are copied from the store between two steps, and that are read ahead of the copies.
_COPIED, _READ_AHEAD = 32 << 20, 512 << 20
_READERS = 4
# Chains that wait to be copied; further ones are dropped.
_MOST_PENDING = 16
# Assumed until measured, in bytes a second.
_READ_SPEED = 5e8
# Seconds that a request waits for the disk at most, beside what computing takes.
_PATIENCE = 10.0


def open_folder(
    model: LoadedModel, groups: list[KVGroup], config: EngineConfig
) -> tuple[Folder, bytes] | None:
    """The folder of this user, and the namespace of a model; None, with a warning, if the folder
    cannot be used."""
    path = envs.prefix_folder()
    try:
        digest = namespace(model, groups, config.block_size)
        folder = Folder(path, int(config.prefix_disk_gib * 2**30))
        folder.enter_namespace(digest, model.name)
    except Exception as e:  # a read-only or broken folder must not keep a model from serving
        logger.warning(f"prefixes are not kept on the disk: {path}: {one_line(e)}")
        return None
    return folder, digest


Owned = tuple[BlockPool, list[int]]


class _Plan(NamedTuple):
    """parts: of the prefix, those in memory among them.  num_tokens: that the disk adds."""

    parts: list[Part]
    num_tokens: int


class _Restore:
    """One prefix on its way from the disk.

    parts: with the block or slot of each, in order.  owned: blocks and slots by pool, until the
    end.  deadline: by time.monotonic().
    """

    def __init__(
        self, request: Request, parts: list[tuple[Part, int]], owned: list[Owned], num_tokens: int
    ) -> None:
        self.request, self.owned, self.num_tokens = request, owned, num_tokens
        self.unread = deque(parts)
        self.reads: deque[tuple[Part, int, Future[memoryview | None]]] = deque()
        self.begun = time.monotonic()
        self.num_bytes = self.num_resets = 0
        self.deadline = 0.0


class PrefixDisk:
    """Restores and keeps the prefixes of one engine.  One thread calls it, that of the engine.

    num_restored_tokens: that requests did not compute because they were on the disk.
    """

    def __init__(
        self, folder: Folder, digest: bytes, scheduler: Scheduler, store: PagedStore
    ) -> None:
        self.folder, self.scheduler, self.kv = folder, scheduler, scheduler.kv
        self.writer = Writer(folder)
        self.min_tokens = MIN_TOKENS
        self.num_restored_tokens = 0
        self._digest = digest
        self._bytes = BlockBytes(store)
        self._sizes = {g: self._bytes.block_size(g) for g in range(len(self.kv.groups))}
        self._sizes[STATES] = self._bytes.state_size
        self._readers = ThreadPoolExecutor(_READERS, "prefix-disk")
        self._restore: _Restore | None = None
        self._asked = False  # whether some waiting request may want one
        self._pending: deque[tuple[list[bytes], deque[Part]]] = deque()
        self._read_speed = _READ_SPEED
        self._compute_speed: float | None = None  # tokens a second
        self._last_end = 0.0

    # Restore

    def holds(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a request waits for the disk.  hit: what it finds in memory."""
        if request.wants_restore is None:
            request.wants_restore = self._plan(request, hit) is not None
            self._asked |= request.wants_restore
        return request.wants_restore

    def _plan(self, request: Request, hit: PrefixHit) -> _Plan | None:
        """The prefix that a request should have from the disk; None if reading is not worth it."""
        size, known = self.kv.block_size, self.folder.known
        most = last_position(request.num_tokens, size) // size
        if request.skip_prefix_cache_read or not known or not self.kv.enable_caching or not most:
            return None
        chain = self._chain(request, most)
        length = chain.longest(known, hit.num_tokens // size)
        num_tokens = length * size - hit.num_tokens
        if num_tokens < self.min_tokens:
            return None
        parts = list(chain.parts(length))
        num_bytes = sum(self._sizes[p.group] for p in parts if chain.in_memory(p) is None)
        return _Plan(parts, num_tokens) if self._is_faster(num_bytes, num_tokens) else None

    def _is_faster(self, num_bytes: int, num_tokens: int) -> bool:
        speed = self._compute_speed
        return speed is None or num_bytes / self._read_speed < num_tokens / speed

    def _chain(self, request: Request, length: int) -> Chain:
        names = self.kv.block_names(request, length * self.kv.block_size)[:length]
        return Chain(self.kv, self._digest, names)

    def _start(self, request: Request) -> None:
        """Take blocks for a request's prefix, and begin to read."""
        plan = self._plan(request, self.kv.find_prefix(request))
        restore = None if plan is None else self._take_blocks(request, plan)
        request.wants_restore = restore is not None
        if restore is None:
            return
        computing = restore.num_tokens / (self._compute_speed or 1e3)
        restore.deadline = restore.begun + _PATIENCE + computing
        restore.num_resets = self.kv.num_resets
        self._restore = restore
        self._read_ahead(restore)

    def _take_blocks(self, request: Request, plan: _Plan) -> _Restore | None:
        """Own what is in memory, so that it stays, and new blocks; None if there is no room."""
        parts, chain, states = plan.parts, self._chain(request, 0), self.kv.states
        in_memory = {part: chain.in_memory(part) for part in parts}
        spare, new = self.scheduler.spare_blocks(), []
        pools = dict(enumerate(self.kv.pools)) | ({} if states is None else {STATES: states.pool})
        for g, pool in pools.items():
            found = [in_memory[p] for p in parts if p.group == g]
            count = sum(block is None for block in found)
            unowned = sum(block is not None and not pool.is_owned(block) for block in found)
            if g == STATES:
                assert states is not None, "a pool of states"
                if count + unowned and not states.has_spare(self.scheduler.num_running):
                    return None
            elif count + unowned > spare[g]:
                return None
        owned = []
        for g, pool in pools.items():
            of = [p for p in parts if p.group == g]
            pool.touch(block for p in of if (block := in_memory[p]) is not None)
            taken = pool.allocate(sum(in_memory[p] is None for p in of))
            assert taken is not None, "the pool has spare blocks"
            fresh = iter(taken)
            blocks = []
            for p in of:
                block = in_memory[p]
                if block is None:
                    block = next(fresh)
                    new.append((p, block))
                blocks.append(block)
            owned.append((pool, blocks))
        new.sort(key=lambda part: part[0].group)
        return _Restore(request, new, owned, plan.num_tokens)

    def _read_ahead(self, restore: _Restore) -> None:
        ahead = sum(self._sizes[part.group] for part, _, _ in restore.reads)
        while restore.unread and ahead < _READ_AHEAD:
            part, place = restore.unread.popleft()
            size = self._sizes[part.group]
            read: Future[memoryview | None] = Future()
            if size:
                read = self._readers.submit(self.folder.read, part.key, size)
            else:  # without attention layers, blocks only count tokens
                read.set_result(memoryview(b""))
            restore.reads.append((part, place, read))
            ahead += size

    def _go_on(self, restore: _Restore) -> None:
        """Copy what has been read, and end the restore if it is done or must stop."""
        request, kv = restore.request, self.kv
        while restore.reads and restore.reads[0][2].done():
            part, place, read = restore.reads.popleft()
            data = None if read.exception() else read.result()
            if data is None or kv.num_resets != restore.num_resets:
                self._end(restore)
                return
            if part.group == STATES:
                assert kv.states is not None, "a state of a model with states"
                self._bytes.write_state(place, data)
                kv.states.name(place, part.name)
            else:
                self._bytes.write_block(part.group, place, data)
                kv.pools[part.group].publish(place, part.name)
            restore.num_bytes += len(data)
        late = time.monotonic() > restore.deadline or kv.num_available < self.scheduler.num_running
        if request.status is RequestStatus.FINISHED or late:
            self._end(restore)
        elif restore.unread or restore.reads:
            self._read_ahead(restore)
        else:
            seconds = time.monotonic() - restore.begun
            self._read_speed = restore.num_bytes / max(seconds, 1e-6)
            self.num_restored_tokens += restore.num_tokens
            self._end(restore)

    def _end(self, restore: _Restore) -> None:
        """Leave the blocks to the cache: those that were filled have names."""
        for _, _, read in restore.reads:
            read.cancel()
        for pool, blocks in restore.owned:
            pool.free(blocks)
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
            if not self.kv.may_name(request):
                continue
            if request in output.admitted and start:
                self._keep(request, start // size)
            for at in request.checkpoint_positions[:1]:
                if start < at <= segment.end:
                    self._keep(request, at // size)

    def _keep(self, request: Request, length: int) -> None:
        is_long = length and length * self.kv.block_size >= self.min_tokens
        if is_long and len(self._pending) < _MOST_PENDING:
            parts = list(self._chain(request, length).parts(length))
            self._pending.append(([part.key for part in parts], deque(parts)))

    def _copy_some(self) -> None:
        """Copy blocks of the first chain for the writer."""
        keys, parts = self._pending[0]
        chain, files, num_bytes = Chain(self.kv, self._digest, ()), list[File](), 0
        while parts and num_bytes < _COPIED:
            part = parts.popleft()
            place = chain.in_memory(part)
            is_kept = part.key in self.folder.known or part.key in self.writer.keys
            if is_kept or place is None or not self._sizes[part.group]:
                continue
            if part.group == STATES:
                data = self._bytes.read_state(place)
            else:
                data = self._bytes.read_block(part.group, place)
            files.append((part.key, data))
            num_bytes += len(data)
        self.writer.add(keys, files)
        if not parts:
            self._pending.popleft()

    # Called by the engine

    @property
    def wants_a_pause(self) -> bool:
        """Whether `between_steps` has something to do."""
        if self._restore is not None:
            reads = self._restore.reads
            return not reads or reads[0][2].done()
        return self._asked or (bool(self._pending) and self.writer.has_room)

    def between_steps(self) -> None:
        """Copy blocks from and to the store.  No step is in flight."""
        if not self.wants_a_pause:
            return
        mx.synchronize()
        if self._pending and self.writer.has_room:
            self._copy_some()
        if self._restore is not None:
            self._go_on(self._restore)
        if self._restore is None and self._asked:
            request = next((r for r in self.scheduler.waiting if r.wants_restore), None)
            self._asked = request is not None
            if request is not None:
                self._start(request)

    def wait(self) -> None:
        """Wait a moment for the disk: there is no step to run meanwhile."""
        if self._restore is not None and self._restore.reads:
            with suppress(TimeoutError):
                self._restore.reads[0][2].exception(0.05)

    def reset(self) -> None:
        """Forget the prefixes of this model, as the cache in memory does."""
        self._pending.clear()
        if self._restore is not None:
            self._end(self._restore)
        self.folder.known = set()
        self._readers.submit(self.folder.clear, self._digest)

    def metrics(self) -> dict[str, int]:
        return {
            "prefix_disk_restored_tokens": self.num_restored_tokens,
            "prefix_disk_written_bytes": self.writer.num_bytes,
            "prefix_disk_errors": self.writer.num_errors + self.folder.num_bad,
        }

    def close(self) -> None:
        """Stop the threads; what is not written yet is lost."""
        self._readers.shutdown()
        self.writer.close()
        self.folder.close()
