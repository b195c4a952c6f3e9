"""Which blocks a prompt needs from the disk, and which of them it has in memory."""

from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from vllm_metal_lite.scheduler.kv_manager import KVCacheManager

# In place of a KV group: the recurrent states.
STATES = 255


class Part(NamedTuple):
    """One file of a chain: the block `index` of a KV group, or the state behind it (STATES)."""

    key: bytes
    group: int
    index: int
    name: bytes


class Chain:
    """The parts of a prefix: the blocks of full attention first, then those of windows, then the
    state.

    digest: of the namespace.  names: of the prefix's blocks.
    """

    def __init__(self, kv: KVCacheManager, digest: bytes, names: Sequence[bytes]) -> None:
        self.kv, self.names = kv, names
        self._digest = digest

    def part(self, group: int, index: int) -> Part:
        name = self.names[index]
        key = blake2b(self._digest + bytes([group]) + name, digest_size=16).digest()
        return Part(key, group, index, name)

    def parts(self, length: int) -> Iterator[Part]:
        """What a request needs to start behind the first `length` blocks."""
        for g, group in enumerate(self.kv.groups):
            if group.window is None:
                yield from (self.part(g, i) for i in range(length))
        yield from self._late_parts(length)

    def _late_parts(self, length: int) -> Iterator[Part]:
        """Those that a longer prefix does not need."""
        size = self.kv.block_size
        for g, group in enumerate(self.kv.groups):
            if group.window is not None:
                first = group.first_block(length * size, size)
                yield from (self.part(g, i) for i in range(first, length))
        if self.kv.states is not None:
            yield self.part(STATES, length - 1)

    def in_memory(self, part: Part) -> int | None:
        """The block or slot that holds a part; None if none does."""
        if part.group == STATES:
            assert self.kv.states is not None, "a chain of a model with states"
            return self.kv.states.pool.lookup(part.name)
        return self.kv.pools[part.group].lookup(part.name)

    def longest(self, on_disk: Collection[bytes], least: int) -> int:
        """The most blocks, above `least`, whose parts are all in memory or on the disk; 0: none."""

        def missing(part: Part) -> bool:
            is_empty = part.group != STATES and not self.kv.groups[part.group].layers
            return self.in_memory(part) is None and part.key not in on_disk and not is_empty

        length = len(self.names)
        for g, group in enumerate(self.kv.groups):
            if group.window is None:
                length = next((i for i in range(length) if missing(self.part(g, i))), length)
        while length > least:
            lost = [part.index for part in self._late_parts(length) if missing(part)]
            if not lost:
                return length
            length = max(lost)  # no prefix ends behind it until it is out of the window
        return 0
