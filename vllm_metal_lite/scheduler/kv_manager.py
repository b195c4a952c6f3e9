"""The blocks of all requests, over all KV cache groups at once.

The block tables of a request are equally long in every group.  What lies behind a group's window is
given back while the context grows: the table keeps the number, which nobody reads any more.
"""

from collections.abc import Iterable, Sequence

from vllm_metal_lite.scheduler.block_pool import BlockPool, BlockTable
from vllm_metal_lite.scheduler.kv_groups import KVGroup
from vllm_metal_lite.scheduler.prefix_hash import extend_block_hashes
from vllm_metal_lite.scheduler.request import Request

# Blocks to be added to a request's block tables, one sequence a group; empty: none.
NewBlocks = Sequence[Sequence[int]]


class KVCacheManager:
    """Pools and prefixes of the groups.  What does not fit changes nothing in any of them."""

    def __init__(self, groups: Sequence[KVGroup], block_size: int, enable_caching: bool) -> None:
        self.groups, self.block_size, self.enable_caching = groups, block_size, enable_caching
        self.pools = [BlockPool(g.num_blocks, enable_caching) for g in groups]
        self._windowed = [
            (g, group, pool)
            for g, (group, pool) in enumerate(zip(groups, self.pools, strict=True))
            if group.window is not None
        ]

    # What a request needs

    def too_large(self, num_tokens: int, chunk: int) -> tuple[int, int] | None:
        """(blocks needed, blocks there are) where so many tokens, `chunk` of them at a time, could
        never be stored; None if they can."""
        for group, pool in zip(self.groups, self.pools, strict=True):
            need = group.most_blocks(num_tokens, chunk, self.block_size)
            if need > pool.num_blocks:
                return need, pool.num_blocks
        return None

    def wanted(self, request: Request, chunk: int) -> list[int]:
        """Blocks by group for all known tokens, `chunk` of them at a time, and one to go on unless
        the request will end before."""
        return [self._wanted(g, request, chunk) for g in range(len(self.groups))]

    def _wanted(self, group: int, request: Request, chunk: int) -> int:
        size = min(len(request.token_ids) + self.block_size, request.max_length - 1)
        most = self.groups[group].most_blocks(size, chunk, self.block_size)
        return min(most, self.pools[group].num_blocks)

    def spare(self, running: Sequence[tuple[Request, int]]) -> list[int]:
        """Blocks by group that are left when each of these has what it wants with its chunk."""
        left = []
        for g, pool in enumerate(self.pools):
            count = pool.num_available
            for request, chunk in running:
                owned = request.block_tables[g].num_owned
                count -= max(self._wanted(g, request, chunk) - owned, 0)
            left.append(count)
        return left

    @property
    def num_available(self) -> int:
        """How many blocks there are in every group, for whoever needs one in each."""
        return min(pool.num_available for pool in self.pools)

    def room(self, request: Request) -> int:
        """How many tokens more of a request there are blocks for."""
        reach = (request.num_blocks + self.num_available) * self.block_size
        return reach - request.num_computed_tokens

    # Blocks come and go

    def admit(self, request: Request, hits: Sequence[BlockTable]) -> None:
        """Begin the block tables of a request with what `find_prefix` found."""
        for pool, table in zip(self.pools, hits, strict=True):
            pool.touch(table.owned)
        request.block_tables = list(hits)

    def allocate(self, request: Request, start: int, end: int) -> NewBlocks | None:
        """Blocks for tokens [start, end) in all groups, or in none (None), once what is behind the
        windows is given back.  All tokens before `start` are computed, or under way."""
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
        """Give back what tokens from `start` on do not see."""
        for g, group, pool in self._windowed:
            table = request.block_tables[g]
            first = group.first_block(start, self.block_size)
            if first > table.num_given_back:
                pool.free(table.block_ids[table.num_given_back : first])
                table.num_given_back = first

    def free(self, request: Request) -> None:
        """Give back everything."""
        for pool, table in zip(self.pools, request.block_tables, strict=False):
            pool.free(table.owned)
        request.block_tables = []

    # Prefix cache

    def find_prefix(self, request: Request) -> list[BlockTable]:
        """Block tables of the longest prefix that all groups hold as far as its next token sees it;
        the request's last token is always left to compute."""
        most = 0
        if self.enable_caching and not request.skip_prefix_cache_read:
            most = (request.num_tokens - 1) // self.block_size
            self._hash(request, most)
        hashes, length = request.block_hashes, most
        for pool, group in zip(self.pools, self.groups, strict=True):
            if group.window is None:
                found = 0
                while found < length and pool.lookup(hashes[found]) is not None:
                    found += 1
                length = found
        before = None
        while length != before:  # until nothing is missing from the end of any window
            before = length
            for _, group, pool in self._windowed:
                end = range(group.first_block(length * self.block_size, self.block_size), length)
                missing = (i for i in reversed(end) if pool.lookup(hashes[i]) is None)
                length = next(missing, length)
        tables = []
        for pool, group in zip(self.pools, self.groups, strict=True):
            first = group.first_block(length * self.block_size, self.block_size)
            blocks = [pool.named(h) for h in hashes[first:length]]
            tables.append(BlockTable([0] * first + blocks, first))
        return tables

    def publish(self, request: Request, start: int, end: int) -> list[tuple[int, int]]:
        """Name the blocks that tokens [start, end) complete; (group, block) of those that got one.

        Before they are written: every layer writes all rows of a step before it reads any, so
        requests of this same step may share them.
        """
        first, last = start // self.block_size, end // self.block_size
        if last == first or not self.enable_caching:
            return []
        self._hash(request, last)
        return [
            (g, table.block_ids[i])
            for g, (pool, table) in enumerate(zip(self.pools, request.block_tables, strict=True))
            for i in range(first, last)
            if pool.publish(table.block_ids[i], request.block_hashes[i])
        ]

    def unpublish(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Take names back that `publish` gave."""
        for group, block in blocks:
            self.pools[group].unpublish([block])

    def reset(self) -> None:
        """Forget all cached prefixes."""
        for pool in self.pools:
            pool.reset()

    def _hash(self, request: Request, num_blocks: int) -> None:
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, num_blocks)

    def check(self, requests: Iterable[Request] | None = None) -> None:
        """Assert that the accounts are right; with all requests, that the ownerships are too."""
        requests = None if requests is None else list(requests)
        for i, pool in enumerate(self.pools):
            tables = None
            if requests is not None:
                tables = [r.block_tables[i].owned for r in requests if r.block_tables]
            pool.check(tables)
