"""The files that make up a prefix, and which of them are in memory."""

from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from vllm_metal_lite.scheduler.kv_manager import KVCacheManager


class Part(NamedTuple):
    """One file: block `at` of a KV group, or the state behind this block, in the "group" behind
    the last one.  name: of the block."""

    key: bytes
    group: int
    at: int
    name: bytes


class Chain:
    """The parts of a prefix.  digest: of the namespace.  names: of the prefix's blocks.

    pools: those of the KV groups, and of the states if the model keeps any.
    """

    def __init__(self, kv: KVCacheManager, digest: bytes, names: Sequence[bytes]) -> None:
        self.kv, self.names = kv, names
        self.pools = list(kv.pools) + ([] if kv.states is None else [kv.states.pool])
        self._digest = digest

    def parts(self, length: int) -> Iterator[Part]:
        """What a request needs to start behind the first `length` blocks."""
        for g, group in enumerate(self.kv.groups):
            if group.window is None:
                yield from (self._part(g, i) for i in range(length))
        yield from self._late_parts(length)

    def _late_parts(self, length: int) -> Iterator[Part]:
        """Those that a longer prefix does not need."""
        size = self.kv.block_size
        for g, group in enumerate(self.kv.groups):
            if group.window is not None:
                first = group.first_block(length * size, size)
                yield from (self._part(g, i) for i in range(first, length))
        if self.kv.states is not None:
            yield self._part(len(self.kv.groups), length - 1)

    def _part(self, group: int, at: int) -> Part:
        name = self.names[at]
        key = blake2b(self._digest + bytes([group]) + name, digest_size=16).digest()
        return Part(key, group, at, name)

    def in_memory(self, part: Part) -> int | None:
        """The block or slot that holds a part; None if none does."""
        return self.pools[part.group].lookup(part.name)

    def longest(self, on_disk: Collection[bytes], least: int) -> int:
        """The most blocks, above `least`, whose parts are all in memory or on the disk; 0: none."""

        def missing(part: Part) -> bool:
            # Blocks without layers only count tokens, and have no files.
            has_file = part.group == len(self.kv.groups) or self.kv.groups[part.group].layers
            return self.in_memory(part) is None and bool(has_file) and part.key not in on_disk

        length = len(self.names)
        for g, group in enumerate(self.kv.groups):
            if group.window is None:
                length = next((i for i in range(length) if missing(self._part(g, i))), length)
        while length > least:
            lost = [part.at for part in self._late_parts(length) if missing(part)]
            if not lost:
                return length
            length = max(lost)  # no prefix ends behind it until it is out of the window
        return 0
