"""The blocks of all requests, in all KV cache groups.

A request's block tables have the same length in every group.  As the context grows, blocks behind a
group's window are released; their entries stay in the table but are no longer read.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple
from weakref import WeakSet

from vllm_metal_lite.scheduler.block_pool import BlockPool, BlockTable
from vllm_metal_lite.scheduler.checkpoints import likely_starts
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.prefix_hash import extend_block_names
from vllm_metal_lite.scheduler.request import Request, Span
from vllm_metal_lite.scheduler.state_slots import StateSlots

# Blocks to append to a request's block tables, one sequence per group; empty: none.
NewBlocks = Sequence[Sequence[int]]
# Looks up a name; None if it is unknown.
Find = Callable[[bytes], object]


class PrefixHit(NamedTuple):
    """The longest prefix that a request can start behind.

    tables: the block tables of the prefix.  num_tokens: its length.  num_in_blocks: how many tokens
    the full groups hold; more than num_tokens if a window or the state is missing at their end.
    state_slot: the slot of the state at the end.
    """

    tables: list[BlockTable]
    num_tokens: int
    num_in_blocks: int
    state_slot: int | None = None


class KVCacheManager:
    """Block pools and prefix cache of all groups.  A failed allocation takes no blocks.

    states: the slots of recurrent states; None for a model without any.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        block_size: int,
        enable_caching: bool,
        states: StateSlots | None = None,
    ) -> None:
        self.groups, self.block_size, self.enable_caching = groups, block_size, enable_caching
        self.states = states
        # Requests admitted since the last reset; None: there was no reset.
        self._since_reset: WeakSet[Request] | None = None
        # Where others may start behind the tokens of a running request, if there are windows.
        self._likely_starts: dict[Request, list[int]] = {}
        self.pools = [BlockPool(g.num_blocks) for g in groups]
        self._windowed = [
            (g, group, pool)
            for g, (group, pool) in enumerate(zip(groups, self.pools, strict=True))
            if group.window is not None
        ]

    # Block needs

    def too_large(self, num_tokens: int, spans: Sequence[Span] = ()) -> tuple[int, int] | None:
        """(blocks needed, blocks in the pool) of the first group that can never store num_tokens,
        these spans of them in one step each; None if all groups can."""
        size = self.block_size
        for group, pool in zip(self.groups, self.pools, strict=True):
            needs = [-(-end // size) - group.first_block(start, size) for start, end in spans]
            need = max([group.most_blocks(num_tokens, 1, size), *needs])
            if need > pool.num_blocks:
                return need, pool.num_blocks
        return None

    def blocks_needed(self, request: Request, num_new_tokens: int) -> list[int]:
        """How many blocks the request needs in each group: those of its known tokens, computed
        num_new_tokens at a time, and one more unless the request ends first."""
        size = min(len(request.token_ids) + self.block_size, request.max_length - 1)
        return [
            min(group.most_blocks(size, num_new_tokens, self.block_size), pool.num_blocks)
            for group, pool in zip(self.groups, self.pools, strict=True)
        ]

    def cost(self, request: Request, hit: PrefixHit, num_new_tokens: int) -> list[int]:
        """How many blocks of each group an admission makes unavailable.

        A hit on a cached block makes it unavailable; a hit on an owned block costs nothing.
        """
        needed = self.blocks_needed(request, num_new_tokens)
        return [
            count - sum(map(pool.is_owned, table.owned))
            for count, pool, table in zip(needed, self.pools, hit.tables, strict=True)
        ]

    def spare(self, running: Sequence[tuple[Request, int]]) -> list[int]:
        """How many blocks of each group are left after each running request gets its
        `blocks_needed`.  running: pairs (request, num_new_tokens)."""
        left = [pool.num_available for pool in self.pools]
        for request, num_new_tokens in running:
            for g, count in enumerate(self.blocks_needed(request, num_new_tokens)):
                left[g] -= max(count - request.block_tables[g].num_owned, 0)
        return left

    @property
    def num_available(self) -> int:
        """How many blocks every group can allocate."""
        return min(pool.num_available for pool in self.pools)

    def room(self, request: Request) -> int:
        """How many more tokens of the request fit in its own and the available blocks."""
        reach = (request.num_blocks + self.num_available) * self.block_size
        return reach - request.num_computed_tokens

    # Allocate and release

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Start a request's block tables and its state from a hit of `find_prefix`, and plan its
        checkpoints."""
        if hit.num_tokens:
            for pool, table in zip(self.pools, hit.tables, strict=True):
                pool.touch(table.owned)
        request.block_tables = list(hit.tables)
        if not self.enable_caching:
            return
        if self._since_reset is not None:
            self._since_reset.add(request)
        if self._windowed:
            start = hit.num_tokens
            likely = likely_starts(request, start, max(hit.num_in_blocks, start), self.block_size)
            self._likely_starts[request] = [*likely, start]
            self._use_named_windows(request, start)

    def _use_named_windows(self, request: Request, most: int) -> None:
        """Mark the whole windows before the positions that a request names as used just now."""
        places = [at // self.block_size for at in request.checkpoint_positions if at <= most]
        for place, (_, group, pool) in product(places, self._windowed):
            first = group.first_block(place * self.block_size, self.block_size)
            found = map(pool.lookup, request.block_names[first:place])
            blocks = [block for block in found if block is not None]
            if len(blocks) == place - first:
                pool.evict_last(blocks)

    def allocate(self, request: Request, start: int, end: int) -> NewBlocks | None:
        """Release blocks behind the windows, then allocate for tokens [start, end) in every group;
        None if they do not fit.  All tokens before `start` are computed or in flight."""
        self.give_back(request, start)
        count = -(-end // self.block_size) - request.num_blocks
        if count <= 0:
            return ()
        if count > self.num_available:
            return None
        new = []
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            blocks = pool.allocate(count)
            assert blocks is not None, "num_available is the least of all pools"
            table.block_ids += blocks
            new.append(blocks)
        return new

    def give_back(self, request: Request, start: int) -> None:
        """Release the blocks that tokens from `start` on cannot see."""
        for g, group, pool in self._windowed:
            table = request.block_tables[g]
            first = group.first_block(start, self.block_size)
            if first > table.num_given_back:
                blocks = table.block_ids[table.num_given_back : first]
                pool.free(blocks)
                # No request can start at a position whose window has lost a block.
                size, starts = self.block_size, self._likely_starts.get(request, ())
                windows = [range(group.first_block(at, size), at // size) for at in starts]
                pool.evict_first(
                    block
                    for place, block in enumerate(blocks, table.num_given_back)
                    if not any(place in window for window in windows)
                )
                table.num_given_back = first

    def cut(self, request: Request, end: int) -> None:
        """Release the blocks behind token `end`, which only drafts have used."""
        count = -(-end // self.block_size)
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            pool.free(table.block_ids[count:])
            del table.block_ids[count:]

    def free(self, request: Request) -> None:
        """Release all blocks of a request."""
        for pool, table in zip(self.pools, request.block_tables, strict=False):
            pool.free(table.owned)
        request.block_tables = []
        self._likely_starts.pop(request, None)

    # Prefix cache

    @property
    def uses_checkpoints(self) -> bool:
        """Whether requests can start at some positions only: by their states, or their windows."""
        return self.enable_caching and (self.states is not None or bool(self._windowed))

    def reads_cache(self, request: Request) -> bool:
        """Whether a request may start behind a cached prefix."""
        return self.enable_caching and not request.skip_prefix_cache_read

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix: every group holds the part that the next token sees, and there
        is a state if the model keeps one.  The request's last token is never part of it."""
        names, in_blocks, length = request.block_names, 0, 0
        find = [pool.lookup for pool in self.pools]
        find_state = None if self.states is None else self.states.lookup
        if self.reads_cache(request):
            in_blocks, length = self.longest_prefix(request, find, find_state)
        state = find_state(names[length - 1]) if find_state is not None and length else None
        tables = []
        for pool, group in zip(self.pools, self.groups, strict=True):
            first = group.first_block(length * self.block_size, self.block_size)
            blocks = [pool.named(name) for name in names[first:length]]
            tables.append(BlockTable([0] * first + blocks, first))
        return PrefixHit(tables, length * self.block_size, in_blocks * self.block_size, state)

    def longest_prefix(
        self, request: Request, find: Sequence[Find], find_state: Find | None
    ) -> tuple[int, int]:
        """How many blocks of a request the full groups hold, and how many can be used again.

        find: the look-up of blocks of each group.  find_state: None if there are no states.
        """
        names = self.block_names(request, request.num_tokens - 1)
        length = len(names)
        for group, found in zip(self.groups, find, strict=True):
            if group.window is None:
                length = next((i for i in range(length) if found(names[i]) is None), length)
        whole = self._whole_windows(request, length, find)
        in_blocks, length = length if self.groups[0].window is None else whole, whole
        while find_state is not None and length and find_state(names[length - 1]) is None:
            length = self._whole_windows(request, length - 1, find)
        return in_blocks, length

    def _whole_windows(self, request: Request, length: int, find: Sequence[Find]) -> int:
        """The largest n <= length where n blocks end within no span of the request, and where every
        windowed group still has all blocks that the next token sees."""
        before, names, size = None, request.block_names, self.block_size
        while length != before:
            before = length
            length = request.last_boundary(length * size, size) // size
            for g, group, _ in self._windowed:
                end = range(group.first_block(length * size, size), length)
                missing = (i for i in reversed(end) if find[g](names[i]) is None)
                length = next(missing, length)
        return length

    def may_name(self, request: Request) -> bool:
        """Whether later requests may find what a request computes: False if `reset` was called
        after its admission."""
        return self.enable_caching and (self._since_reset is None or request in self._since_reset)

    def name_blocks(self, request: Request, start: int, end: int) -> list[tuple[int, int]]:
        """Name the blocks that tokens [start, end) complete; returns the new (group, block) pairs.

        The blocks are not written yet.  Every layer writes all rows of a step before it reads any,
        so requests of the same step may share them.
        """
        first, last = start // self.block_size, end // self.block_size
        if last == first or not self.may_name(request):
            return []
        names = self.block_names(request, end)
        return [
            (g, table.block_ids[i])
            for g, (pool, table) in enumerate(zip(self.pools, request.block_tables, strict=True))
            for i in range(first, last)
            if pool.name(table.block_ids[i], names[i])
        ]

    def unname(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Remove names that `name_blocks` gave."""
        for group, block in blocks:
            self.pools[group].unname([block])

    def reset(self) -> None:
        """Forget all cached prefixes, and what running requests would add to them."""
        self._since_reset = WeakSet()
        for pool in self.pools:
            pool.reset()
        if self.states is not None:
            self.states.reset()

    def block_names(self, request: Request, num_tokens: int) -> list[bytes]:
        """The names of all full blocks of the first num_tokens."""
        names, num_blocks = request.block_names, num_tokens // self.block_size
        if num_blocks > len(names):
            tokens, salt, pictures = request.token_ids, request.cache_salt, request.pictures
            extra_name = None if pictures is None else pictures.extra_name
            extend_block_names(names, tokens, self.block_size, num_blocks, salt, extra_name)
        return names[:num_blocks]
