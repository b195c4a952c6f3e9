"""The parts that make up a prefix, and which of them are in memory."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from vllm_metal_lite.scheduler.kv_manager import KVCacheManager
from vllm_metal_lite.scheduler.request import Request


class Part(NamedTuple):
    """A block of a KV group, or a state, whose group is the number of KV groups.

    key: of the file.  name: of the block, or of the block before the state.
    """

    key: bytes
    group: int
    name: bytes


class Parts:
    """The parts of prefixes, which are given as the names of their blocks.

    digest: the namespace's.  pools: the KV groups', and the states' if the model keeps any.
    """

    # Shorter prefixes are neither written nor restored.
    min_tokens = 256

    def __init__(self, kv: KVCacheManager, digest: bytes) -> None:
        self.kv, self.digest = kv, digest
        self.pools = list(kv.pools) + ([] if kv.states is None else [kv.states.pool])

    def names(self, request: Request, num_tokens: int) -> list[bytes]:
        """The names of all full blocks in the request's first num_tokens."""
        names = self.kv.block_names(request, num_tokens)
        return names[: num_tokens // self.kv.block_size]

    def of(self, names: Sequence[bytes]) -> Iterator[Part]:
        """The parts that a request needs to start behind a prefix."""
        size, length = self.kv.block_size, len(names)
        for g, group in enumerate(self.kv.groups):
            for at in range(group.first_block(length * size, size), length):
                yield self._part(g, names[at])
        if self.kv.states is not None:
            yield self._part(len(self.kv.groups), names[-1])

    def _part(self, group: int, name: bytes) -> Part:
        key = blake2b(self.digest + bytes([group]) + name, digest_size=16).digest()
        return Part(key, group, name)

    def has_file(self, group: int) -> bool:
        """False for blocks without layers, which only count tokens."""
        return group == len(self.kv.groups) or bool(self.kv.groups[group].layers)

    def in_memory(self, part: Part) -> int | None:
        """The block or slot that holds a part; None if none does."""
        return self.pools[part.group].lookup(part.name)

    def longest(self, names: Sequence[bytes], on_disk: Collection[bytes]) -> int:
        """The most blocks whose parts are all in memory or on the disk."""

        def find(group: int, name: bytes) -> bool | None:
            part = self._part(group, name)
            is_on_disk = part.key in on_disk or not self.has_file(group)
            return is_on_disk or self.in_memory(part) is not None or None

        by_group = [partial(find, group) for group in range(len(self.pools))]
        state = None if self.kv.states is None else by_group.pop()
        return self.kv.longest_prefix(names, by_group, state)[1]
