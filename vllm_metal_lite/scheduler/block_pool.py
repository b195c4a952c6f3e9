"""Records which requests hold which blocks of the store.

Every block is exactly one of
    free    no name, no owner
    cached  named by the hash of its tokens, no owner: can be found again or evicted
    owned   in the block tables of `ref` > 0 requests, named or not
Every move between the three is O(1) per block.  The pool knows only block ids; the contents are on
the device.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """Blocks of one request, in order.  The request no longer owns the first num_given_back."""

    block_ids: list[int] = field(default_factory=list)
    num_given_back: int = 0

    @property
    def owned(self) -> list[int]:
        return self.block_ids[self.num_given_back :]

    @property
    def num_owned(self) -> int:
        return len(self.block_ids) - self.num_given_back


class BlockPool:
    """Allocates block ids 0 .. num_blocks - 1 and looks up full blocks by name."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.peak_owned = self.num_evicted = 0
        self._ref = [0] * num_blocks
        self._name: list[bytes | None] = [None] * num_blocks
        self._by_name: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_available

    def cached_blocks(self) -> list[int]:
        """The ids of all cached blocks, least recently used first."""
        return list(self._cached)

    def is_owned(self, block_id: int) -> bool:
        return self._ref[block_id] > 0

    def allocate(self, n: int) -> list[int] | None:
        """Take n blocks: free ones, then the least recently used.  None if fewer are available."""
        if n > self.num_available:
            return None
        blocks = self._free[: -n - 1 : -1]
        del self._free[len(self._free) - len(blocks) :]
        while len(blocks) < n:
            del self._cached[block := self._least_useful()]
            self._forget(block)
            self.num_evicted += 1
            blocks.append(block)
        for block in blocks:
            self._ref[block] = 1
        self.peak_owned = max(self.peak_owned, self.num_owned)
        return blocks

    def has_name(self, block_id: int) -> bool:
        return self._name[block_id] is not None

    def lookup(self, name: bytes) -> int | None:
        """The block with this name, owned or cached; None if there is none."""
        return self._by_name.get(name)

    def named(self, name: bytes) -> int:
        """Like `lookup`, but the name must exist."""
        return self._by_name[name]

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add one owner to each block; each is owned or cached."""
        for block in block_ids:
            if self._ref[block] == 0:
                del self._cached[block]
            self._ref[block] += 1
        self.peak_owned = max(self.peak_owned, self.num_owned)

    def free(self, block_ids: Sequence[int]) -> None:
        """Release one ownership of each block of a sequence.

        Eviction takes the tail before the head: a block is useful only if all before it hit.
        """
        ref, names = self._ref, self._name
        for block in reversed(block_ids):
            assert ref[block] > 0, f"block {block} was freed twice"
            ref[block] -= 1
            if ref[block] == 0:
                if names[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def evict_first(self, block_ids: Iterable[int]) -> None:
        """Make cached blocks the next to be evicted; others stay as they are."""
        for block in block_ids:
            if block in self._cached:
                self._cached.move_to_end(block, last=False)

    def evict_last(self, block_ids: Sequence[int]) -> None:
        """Cached blocks of a sequence count as used just now; others stay as they are."""
        for block in reversed(block_ids):
            if block in self._cached:
                self._cached.move_to_end(block)

    def name(self, block_id: int, name: bytes) -> bool:
        """Name an owned, full block; False if another block already has this name."""
        if name in self._by_name:
            return False
        assert self._ref[block_id] > 0, f"block {block_id} has no owner"
        assert self._name[block_id] is None, f"block {block_id} has a name"
        self._by_name[name] = block_id
        self._name[block_id] = name
        return True

    def unname(self, block_ids: Iterable[int]) -> None:
        """Remove the names of these blocks; blocks without a name stay unchanged."""
        for block in block_ids:
            if self._name[block] is not None:
                self._forget(block)
                if self._ref[block] == 0:
                    del self._cached[block]
                    self._free.append(block)

    def reset(self) -> None:
        """Forget every name; owners keep their blocks."""
        self.unname(list(self._by_name.values()))

    def _least_useful(self) -> int:
        """The least recently used of the cached blocks."""
        return next(iter(self._cached))

    def _forget(self, block: int) -> None:
        name = self._name[block]
        assert name is not None, f"block {block} has no name"
        del self._by_name[name]
        self._name[block] = None
