"""Checks that the accounts of blocks and of state slots are consistent."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from vllm_metal_lite.prefix_disk.reader import Restore
from vllm_metal_lite.scheduler.block_pool import BlockPool
from vllm_metal_lite.scheduler.kv_manager import KVCacheManager
from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.state_slots import StateSlots


def check_pool(pool: BlockPool, block_tables: Iterable[Sequence[int]] | None = None) -> None:
    """block_tables: the tables of all owners; None: ownerships are not checked."""
    free, cached = set(pool._free), set(pool._cached)
    owned = {b for b in range(pool.num_blocks) if pool._ref[b] > 0}
    assert len(free) == pool.num_free, "a block is free twice"
    assert min(pool._ref, default=0) >= 0
    assert free | cached | owned == set(range(pool.num_blocks)), "a block is lost"
    assert len(free) + len(cached) + len(owned) == pool.num_blocks, "a block is in two states"
    assert len(owned) == pool.num_owned <= pool.peak_owned
    assert all(pool._name[b] is None for b in free), "a free block has a name"
    assert all(pool._name[b] is not None for b in cached), "a cached block has no name"
    names = {name: b for b, name in enumerate(pool._name) if name is not None}
    assert names == pool._by_name, "the names and the index differ"
    if block_tables is not None:
        refs = Counter(b for table in block_tables for b in table)
        assert [refs[b] for b in range(pool.num_blocks)] == pool._ref, "an ownership is wrong"


def check_slots(slots: StateSlots, restored: Sequence[int] = ()) -> None:
    """restored: the slots that the prefix disk owns."""
    owned = [[state.final] for state in slots.running.values()]
    check_pool(slots, [*owned, slots._held, restored])
    assert slots.num_available + len(slots._held) >= slots.num_seats - len(owned)
    assert slots._checkpoints.keys() == set(slots._by_name.values())
    assert all(c.has_name and c.slot == slot for slot, c in slots._checkpoints.items())


def check_accounts(
    kv: KVCacheManager, requests: Iterable[Request], restore: Restore | None = None
) -> None:
    """requests: all unfinished requests, whose windows keep their blocks.  restore: the prefix that
    is being read from the disk."""
    running = [r for r in requests if r.block_tables]
    restored: defaultdict[int, list[int]] = defaultdict(list)
    for part, place in restore.places.items() if restore else ():
        restored[part.group].append(place)
    for i, (group, pool) in enumerate(zip(kv.groups, kv.pools, strict=True)):
        check_pool(pool, [*(r.block_tables[i].owned for r in running), restored[i]])
        for request in running:
            seen = group.first_block(request.num_computed_tokens, kv.block_size)
            assert request.block_tables[i].num_given_back <= seen, "a block is still needed"
    if kv.states is not None:
        assert {*kv.states.running} == {*running}
        check_slots(kv.states, restored[len(kv.pools)])
