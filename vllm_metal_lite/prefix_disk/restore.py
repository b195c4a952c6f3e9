"""One prefix on its way from the disk to the store."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from vllm_metal_lite.prefix_disk.chain import Chain, Part
from vllm_metal_lite.runner.block_bytes import BlockBytes
from vllm_metal_lite.scheduler.block_pool import BlockPool
from vllm_metal_lite.scheduler.request import Request

# Bytes that are read ahead of the copies to the store.
_READ_AHEAD = 256 << 20

Data = Future[memoryview | None]
# Reads a key's bytes, of this size; None: there is no such file, or a bad one.
Read = Callable[[bytes, int], Data]


class _Reading(NamedTuple):
    part: Part
    place: int
    data: Data


class Restore:
    """Reads the parts that are not in memory.  It owns all blocks of the prefix until its end: what
    is in memory stays, and what was copied has a name by then.

    num_tokens: that the disk adds.
    """

    def __init__(self, request: Request, chain: Chain, num_tokens: int) -> None:
        self.request, self.num_tokens = request, num_tokens
        self.reads: deque[_Reading] = deque()
        self.begun, self.num_bytes = time.monotonic(), 0
        self._chain = chain
        self._owned: list[tuple[BlockPool, list[int]]] = []
        self._unread: deque[tuple[Part, int]] = deque()
        self._num_resets = chain.kv.num_resets

    def take(self, parts: Sequence[Part], spare: Sequence[int]) -> bool:
        """Own the places of the parts; False, and none is taken, if a pool has too few.

        spare: places by pool that may be taken.
        """
        chain = self._chain
        by_pool = [[p for p in parts if p.group == g] for g in range(len(chain.pools))]
        for pool, of, left in zip(chain.pools, by_pool, spare, strict=True):
            places = map(chain.in_memory, of)
            if sum(place is None or not pool.is_owned(place) for place in places) > left:
                return False
        for pool, of in zip(chain.pools, by_pool, strict=True):
            known = {p: place for p in of if (place := chain.in_memory(p)) is not None}
            pool.touch(known.values())
            taken = pool.allocate(len(of) - len(known))
            assert taken is not None, "spare places are available"
            missing = dict(zip((p for p in of if p not in known), taken, strict=True))
            self._unread += missing.items()
            self._owned.append((pool, [(known | missing)[p] for p in of]))
        return True

    @property
    def is_ready(self) -> bool:
        """Whether something has been read."""
        return not self.reads or self.reads[0].data.done()

    @property
    def is_done(self) -> bool:
        return not self.reads and not self._unread

    def copy(self, store: BlockBytes, read: Read) -> bool:
        """Copy to the store what has been read, and read on; False if the prefix ends here."""
        kv = self._chain.kv
        while self.reads and self.reads[0].data.done():
            part, place, reading = self.reads.popleft()
            data = None if reading.exception() else reading.result()
            if data is None or kv.num_resets != self._num_resets:
                return False
            store.write(part.group, place, data)
            if part.group < len(kv.groups):
                kv.pools[part.group].name(place, part.name)
            elif kv.states is not None:
                kv.states.name(place, part.name)
            self.num_bytes += len(data)
        ahead = sum(store.size(reading.part.group) for reading in self.reads)
        while self._unread and ahead < _READ_AHEAD:
            part, place = self._unread.popleft()
            self.reads.append(_Reading(part, place, read(part.key, store.size(part.group))))
            ahead += store.size(part.group)
        return True

    def end(self) -> None:
        """Leave the blocks to the cache."""
        for reading in self.reads:
            reading.data.cancel()
        for pool, places in self._owned:
            pool.free(places)
