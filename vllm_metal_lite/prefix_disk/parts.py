"""The parts that make up a prefix, and their places in memory.

A place is a block of a KV group or a slot of a state.  Here states are one more group, the last.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from vllm_metal_lite.scheduler.kv_manager import KVCacheManager
from vllm_metal_lite.scheduler.request import Request


class Part(NamedTuple):
    """A block of a KV group, or a state.

    key: the key of its file.  name: the name of the block, or of the block before the state.
    num_bytes: 0 if the group has no layers here: such a block only counts tokens, and has no file.
    """

    key: bytes
    group: int
    name: bytes
    num_bytes: int


class Parts:
    """The parts of prefixes, which are given as the names of their blocks.

    digest: the namespace.  sizes: the number of bytes of a part, by group.  is_off: set by a reset.
    """

    # Shorter prefixes are neither written nor restored.
    min_tokens = 256

    def __init__(self, kv: KVCacheManager, digest: bytes, sizes: Sequence[int]) -> None:
        self.kv, self.digest, self._sizes = kv, digest, sizes
        self.is_off = False
        self._pools = [*kv.pools, *([] if kv.states is None else [kv.states])]

    def are_kept(self, num_tokens: int) -> bool:
        """Whether prefixes of this length are written and restored."""
        return num_tokens >= self.min_tokens and not self.is_off

    @property
    def may_be_cut(self) -> bool:
        """Whether the first parts of a prefix are a shorter prefix that is of use."""
        return self.kv.states is None and all(group.window is None for group in self.kv.groups)

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
        return Part(key, group, name, self._sizes[group])

    def place_of(self, part: Part) -> int | None:
        """The place of a part; None if it has none."""
        return self._pools[part.group].lookup(part.name)

    def longest(self, request: Request, on_disk: Collection[bytes]) -> int:
        """The number of blocks in the longest prefix of a request that memory and disk hold."""

        def find(group: int, name: bytes) -> bool | None:
            part = self._part(group, name)
            is_on_disk = part.key in on_disk or not part.num_bytes
            return True if is_on_disk or self.place_of(part) is not None else None

        by_group = [partial(find, group) for group in range(len(self._pools))]
        state = None if self.kv.states is None else by_group.pop()
        return self.kv.longest_prefix(request, by_group, state)[1]

    def claim(self, parts: Sequence[Part], spare_blocks: Sequence[int]) -> dict[Part, int]:
        """Take a place for every part; if a group has too few, take none, and return {}.

        spare_blocks: how many blocks each KV group can spare.
        """
        pools, spare = self._pools, [*spare_blocks]
        if self.kv.states is not None:
            self.kv.states.begin_step()  # no step is in flight
            spare.append(self.kv.states.num_spare)
        places = {part: at for part in parts if (at := self.place_of(part)) is not None}
        owned = {part for part, at in places.items() if pools[part.group].is_owned(at)}
        cost = Counter(part.group for part in parts if part not in owned)
        if any(cost[group] > left for group, left in enumerate(spare)):
            return {}
        for part, place in places.items():
            pools[part.group].touch([place])
        for part in parts:
            if part not in places:
                taken = pools[part.group].allocate(1)
                assert taken is not None, "spare places are available"
                (places[part],) = taken
            if not part.num_bytes:
                self.publish(part, places[part])
        return places

    def publish(self, part: Part, place: int) -> None:
        """Let requests find a part, which is complete."""
        self._pools[part.group].name(place, part.name)

    def release(self, places: dict[Part, int]) -> None:
        """Free places, the last first, so that the cache evicts the last parts first."""
        for part, place in reversed(places.items()):
            self._pools[part.group].free([place])
