"""Prefixes on their way from the disk to the store, one after the other.

A waiting request whose prefix continues on the disk stays in the queue, and others pass it.
Threads read the files; between two steps the blocks are copied to the store and named.  Then the
request is admitted with an ordinary hit.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from vllm_metal_lite.prefix_disk.block_bytes import BlockBytes
from vllm_metal_lite.prefix_disk.folder import Folder
from vllm_metal_lite.prefix_disk.parts import Part, Parts
from vllm_metal_lite.scheduler.kv_manager import PrefixHit
from vllm_metal_lite.scheduler.request import Request, RequestStatus
from vllm_metal_lite.scheduler.scheduler import Scheduler
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

_THREADS = 4
# Bytes that are read ahead of the copies to the store.
_READ_AHEAD = 256 << 20
# The most seconds that a restore may take beyond the time that computing takes.
_PATIENCE = 10.0
# Assumed until measured: bytes and tokens a second.
_READ, _COMPUTE = 5e8, 300.0
# The weight of the newest measurement.
_NEWEST = 0.3
# Each prefix that is computed raises the assumed speed, so that a slow disk is tried again.
_DRIFT = 1.01
# Smaller steps say little about the speed of long prompts.
_MIN_ROWS = 256

Read = Future[tuple[memoryview | None, float]]  # the data of a file, and the seconds


class Speeds:
    """The measured speeds.  read: bytes a second.  compute: tokens of prompts a second."""

    def __init__(self) -> None:
        self.read, self.compute = _READ, _COMPUTE

    def prefer_reading(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether reading a prefix takes less time than computing it."""
        is_faster = num_bytes / self.read < num_tokens / self.compute
        if not is_faster and self.read < _READ:
            self.read *= _DRIFT
        return is_faster

    def add_reads(self, num_bytes: int, seconds: float) -> None:
        """Record a prefix of num_bytes, which all threads together read in `seconds`."""
        self.read += _NEWEST * (num_bytes / max(seconds, 1e-6) - self.read)

    def add_step(self, output: SchedulerOutput) -> None:
        """Record a step that has just ended, if most rows are of prompts."""
        rows = output.total_num_scheduled_tokens
        if rows >= _MIN_ROWS and rows > 2 * output.num_decodes:
            self.compute += _NEWEST * (rows / (output.seconds + 1e-6) - self.compute)


@dataclass(eq=False)
class Restore:
    """A prefix that is being read.  It owns the blocks of all its parts, so that none is evicted.

    num_tokens: the tokens that the disk adds.  needed: all parts of the prefix.  unread: the files
    of the parts that are not in memory, until a thread reads them.  deadline: the time (monotonic)
    when the restore is late.  places: the block or slot of each part.  num_reads, num_bytes: the
    files read, and their bytes.  seconds: the time of reading, summed over the threads.
    """

    request: Request
    num_tokens: int
    needed: Sequence[Part]
    unread: deque[Part]
    deadline: float
    reads: deque[tuple[Part, Read]] = field(default_factory=deque)
    places: dict[Part, int] = field(default_factory=dict)
    num_reads: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class DiskReader:
    """Restores prefixes of waiting requests.  Only the engine's thread calls it.

    num_tokens: how many tokens all restores have brought.
    restored: the tokens that a restore has brought for a request.
    waits: whether a request waits for the disk.  A request without an entry is not decided yet.
    """

    def __init__(
        self, folder: Folder, parts: Parts, blocks: BlockBytes, scheduler: Scheduler
    ) -> None:
        self.num_tokens = 0
        self._folder, self._parts, self._blocks = folder, parts, blocks
        self._scheduler, self._kv = scheduler, scheduler.kv
        self._threads = ThreadPoolExecutor(_THREADS, "prefix-disk-reader")
        self.restore: Restore | None = None
        self.restored: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self.waits: WeakKeyDictionary[Request, bool] = WeakKeyDictionary()
        self._has_candidates = False  # whether a request may wait that has no restore yet
        self.speeds = Speeds()

    def decide(self, request: Request, hit: PrefixHit) -> None:
        """Decide whether a request waits for the disk.  hit: its prefix in memory."""
        self.waits[request] = waits = self._find(request, hit) is not None
        self._has_candidates |= waits

    def _find(self, request: Request, hit: PrefixHit) -> Restore | None:
        """Plan the restore behind a hit in memory; None if computing the prefix is faster."""
        parts, size, known = self._parts, self._kv.block_size, self._folder.known
        if request.skip_prefix_cache_read or not known:
            return None
        length = parts.longest(request, known)
        num_tokens = length * size - hit.num_tokens
        if not parts.are_kept(num_tokens):
            return None
        needed = list(parts.of(request.block_names[:length]))
        unread = deque(p for p in needed if p.num_bytes and parts.place_of(p) is None)
        if not self.speeds.prefer_reading(sum(p.num_bytes for p in unread), num_tokens):
            return None
        deadline = time.monotonic() + num_tokens / self.speeds.compute + _PATIENCE
        return Restore(request, num_tokens, needed, unread, deadline)

    @property
    def is_ready(self) -> bool:
        """Whether `advance` has something to do."""
        restore = self.restore
        if restore is None:
            return self._has_candidates
        return not restore.reads or restore.reads[0][1].done() or self._must_stop(restore)

    def advance(self) -> None:
        """Copy to the store what was read, or begin to read the next prefix."""
        if self.restore is not None:
            self._copy_arrived(self.restore)
        elif request := next(filter(self.waits.get, self._scheduler.waiting), None):
            self._start(request)
        else:
            self._has_candidates = False

    def _start(self, request: Request) -> None:
        """Begin to read a request's prefix, if there is room for it."""
        self.waits[request] = False
        restore = self._find(request, self._kv.find_prefix(request))
        if restore is not None:
            restore.places = self._parts.claim(restore.needed, self._scheduler.spare_blocks())
            if restore.places:
                self.waits[request], self.restore = True, restore
                self._submit_reads(restore)

    def _copy_arrived(self, restore: Restore) -> None:
        """Copy the parts that were read; end the restore if it is done or must stop."""
        while restore.reads and restore.reads[0][1].done():
            part, reading = restore.reads[0]
            data, seconds = reading.result()
            if data is None:  # the prefix ends here
                self.stop()
                return
            place = restore.places[part]
            self._blocks.write(part.group, place, data)
            self._parts.publish(part, place)
            restore.reads.popleft()  # last: Ctrl-C may interrupt a copy
            restore.num_reads += 1
            restore.num_bytes += len(data)
            restore.seconds += seconds
        self._submit_reads(restore)
        is_done = not restore.reads
        if is_done:
            self.num_tokens += restore.num_tokens
            self.restored[restore.request] = restore.num_tokens
        if is_done or self._must_stop(restore):
            self.stop()

    def _submit_reads(self, restore: Restore) -> None:
        ahead = sum(part.num_bytes for part, _ in restore.reads)
        while restore.unread and ahead < _READ_AHEAD:
            part = restore.unread.popleft()
            read = self._threads.submit(self._read, part.key)
            restore.reads.append((part, read))
            ahead += part.num_bytes

    def _read(self, key: bytes) -> tuple[memoryview | None, float]:
        """The data of a file, None if it is bad or gone; and the seconds of reading it."""
        start = time.monotonic()
        data = self._folder.read(key)
        return data, time.monotonic() - start

    def _must_stop(self, restore: Restore) -> bool:
        """Whether the request has ended, the restore is late, or others need its blocks."""
        has_ended = restore.request.status is RequestStatus.FINISHED
        is_late = time.monotonic() > restore.deadline
        return is_late or has_ended or self._kv.num_available < self._scheduler.num_running

    def stop(self) -> None:
        """End the restore, and give its places back."""
        if (restore := self.restore) is not None:
            for _, data in restore.reads:
                data.cancel()
            self._parts.release(restore.places)
            if time.monotonic() > restore.deadline:
                self.speeds.read /= 2
            elif restore.num_reads:
                at_once = min(restore.num_reads, _THREADS)
                self.speeds.add_reads(restore.num_bytes, restore.seconds / at_once)
            self.waits[restore.request] = False
            self.restore = None

    def wait(self) -> None:
        """Wait a moment for the next bytes."""
        if self.restore is not None and self.restore.reads:
            wait([self.restore.reads[0][1]], 0.05)
