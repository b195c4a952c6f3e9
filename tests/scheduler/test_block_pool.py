"""Block pool and names of prefixes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.engine.pool_accounts import check_pool
from vllm_metal_lite.scheduler.block_pool import BlockPool
from vllm_metal_lite.scheduler.prefix_hash import extend_block_names


def counts(pool: BlockPool) -> tuple[int, int, int]:
    check_pool(pool)
    return pool.num_free, pool.num_cached, pool.num_owned


def cached(pool: BlockPool, names: list[bytes]) -> list[int]:
    """Blocks that were named and released."""
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        assert pool.name(block, name)
    pool.free(blocks)
    return blocks


def test_least_recently_used_goes_first_and_the_tail_before_the_head():
    pool = BlockPool(4)
    a0, a1 = cached(pool, [b"a0", b"a1"])
    b0, b1 = cached(pool, [b"b0", b"b1"])
    pool.touch([a0, a1])
    pool.free([a0, a1])
    assert [pool.allocate(1) for _ in range(4)] == [[b1], [b0], [a1], [a0]]


def test_a_block_is_not_freed_twice():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_peak_owned_is_the_most_ever_owned():
    pool = BlockPool(4)
    blocks = cached(pool, [b"a", b"b", b"c"])
    assert pool.peak_owned == 3
    pool.touch(blocks)
    pool.allocate(1)
    pool.free(blocks)
    assert pool.peak_owned == 4


class PoolModel(RuleBasedStateMachine):
    """Any sequence of moves, against a plain model of the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.tables: list[list[int]] = []
        self.names: dict[bytes, int] = {}

    @rule(n=st.integers(0, 4))
    def allocate(self, n):
        held = {b for t in self.tables for b in t}
        blocks = self.pool.allocate(n)
        assert (blocks is None) == (n > 6 - len(held))
        if blocks is not None:
            assert len(set(blocks)) == n
            assert not held & set(blocks)
            nameless = set(range(6)) - held - set(self.names.values())
            assert len(nameless & set(blocks)) == min(n, len(nameless))
            self.names = {k: b for k, b in self.names.items() if b not in blocks}
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(i=st.integers(0, 99))
    def free(self, i):
        self.pool.free(self.tables.pop(i % len(self.tables)))

    @precondition(lambda self: any(self.tables))
    @rule(i=st.integers(0, 99), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def name(self, i, name):
        blocks = [b for t in self.tables for b in t if b not in self.names.values()]
        if blocks:
            block = blocks[i % len(blocks)]
            assert self.pool.name(block, name) == (name not in self.names)
            self.names.setdefault(name, block)

    @precondition(lambda self: self.names)
    @rule(i=st.integers(0, 99))
    def touch(self, i):
        name = sorted(self.names)[i % len(self.names)]
        self.pool.touch([self.names[name]])
        self.tables.append([self.names[name]])

    @rule(blocks=st.lists(st.integers(0, 5), max_size=2, unique=True))
    def unname(self, blocks):
        self.pool.unname(blocks)
        self.names = {k: b for k, b in self.names.items() if b not in blocks}

    @rule()
    def reset(self):
        self.pool.reset()
        self.names = {}

    @invariant()
    def account_is_right(self):
        check_pool(self.pool, self.tables)
        assert {k: self.pool.lookup(k) for k in self.names} == self.names


PoolModel.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestPoolModel = PoolModel.TestCase


# Names of prefixes


def names_of(tokens: list[int], block_size: int = 4) -> list[bytes]:
    result: list[bytes] = []
    extend_block_names(result, tokens, block_size, len(tokens) // block_size)
    return result


def test_a_name_stands_for_all_tokens_up_to_the_blocks_end():
    a, b = names_of([1, 2, 3, 4, 5, 6, 7, 8]), names_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert len(set(a + b)) == 4
    assert names_of([1, 2, 3, 4, 5, 6, 7, 9])[0] == a[0]
    assert all(len(h) == 16 for h in a)


def test_a_block_that_is_not_full_has_no_name():
    with pytest.raises(ValueError, match="7 tokens do not fill 2 blocks of 4"):
        extend_block_names([], [1] * 7, 4, 2)


def test_a_name_is_not_computed_again():
    names = [b"stands for the first block"]
    extend_block_names(names, [1, 2, 3, 4, 5, 6, 7, 8], 4, 2)
    assert names[0] == b"stands for the first block"
    assert len(names) == 2
    extend_block_names(names, [1, 2, 3, 4], 4, 1)
    assert len(names) == 2


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 5), st.data())
def test_names_in_parts_are_names_at_once(tokens, block_size, data):
    parts: list[bytes] = []
    for n in sorted(data.draw(st.lists(st.integers(0, len(tokens) // block_size), max_size=4))):
        extend_block_names(parts, tokens, block_size, n)
    extend_block_names(parts, tokens, block_size, len(tokens) // block_size)
    assert parts == names_of(tokens, block_size)
