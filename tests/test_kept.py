"""Decodes that keep what they gathered see what they would have gathered."""

import numpy as np
import pytest

from vllm_metal_lite.attention.kept import _SPARE
from vllm_metal_lite.attention.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch import InputBatch
from vllm_metal_lite.kv.store import LayerSpec, PagedStore

BLOCK, BLOCKS, HEADS, KV_HEADS, DIM = 4, 128, 4, 2, 8


class Decodes:
    """Requests over one store, served by the attention and by one that keeps nothing."""

    def __init__(self, lengths: list[int]) -> None:
        store = PagedStore([LayerSpec(KV_HEADS, DIM, DIM, mx.float32)] * 2, BLOCKS, BLOCK)
        self.attention, self.plain = ReferenceAttention(store), ReferenceAttention(store)
        self.plain._kept = [None]
        self.rng = np.random.default_rng(0)
        self.inputs = InputBatch(8, 256, BLOCK)
        self.free = self.rng.permutation(BLOCKS).tolist()
        self.computed: dict[int, int] = {}
        for n in lengths:
            self.add(n)

    def random(self, *shape: int) -> mx.array:
        return mx.array(self.rng.standard_normal(shape).astype(np.float32))

    def add(self, length: int, blocks: list[int] | None = None, window: int | None = None) -> int:
        row = self.inputs.add([0] * length, length)
        count = -(-length // BLOCK)
        self.inputs.append_blocks(row, blocks or [self.free.pop() for _ in range(count)])
        self.computed[row] = 0
        self.step([row], length, window)
        return row

    def step(
        self, rows: list[int] | None = None, count: int = 1, window: int | None = None
    ) -> bool:
        """Compute `count` tokens of each request; True if what was kept was of use."""
        rows = sorted(self.computed) if rows is None else rows
        for row in rows:
            if self.computed[row] + count > self.inputs.num_blocks[row] * BLOCK:
                self.inputs.append_blocks(row, [self.free.pop()])
            self.inputs.num_tokens[row] = self.computed[row] + count
        computed = np.array([self.computed[row] for row in rows])
        batch = self.inputs.pack(np.array(rows), computed, np.full(len(rows), count))
        step, plain = (a.prepare(batch, batch.num_tokens) for a in (self.attention, self.plain))
        for layer in (0, 1):
            k, v = (self.random(batch.num_tokens, KV_HEADS, DIM) for _ in range(2))
            q = self.random(batch.num_tokens, HEADS, DIM)
            self.attention.write(layer, k, v, step)
            for _ in range(2):  # as layers do that share their K and V
                got = self.attention.attend(layer, q, step, scale=0.3, window=window)
                want = self.plain.attend(layer, q, plain, scale=0.3, window=window)
                assert np.allclose(np.array(got), np.array(want), atol=1e-5)
        for row in rows:
            self.computed[row] += count
        plans = step.sdpa[0]._plans.values()
        return any(g.kept is not None for calls in plans for g in calls.groups)


@pytest.mark.parametrize("lengths", [[9, 9, 9], [2, 6, 30], [40]])
def test_decodes_go_on_with_what_they_have(lengths):
    decodes = Decodes(lengths)
    used = [decodes.step() for _ in range(_SPARE + 6)]
    assert used == [False] + [True] * (_SPARE + 5)


def test_others_that_come_and_go_begin_anew():
    decodes = Decodes([5, 7])
    assert [decodes.step() for _ in range(3)] == [False, True, True]
    last = decodes.add(6)
    assert [decodes.step() for _ in range(3)] == [False, True, True]
    del decodes.computed[last]
    assert [decodes.step() for _ in range(2)] == [False, True]
    assert not decodes.step(count=2), "not a decode"
    assert [decodes.step() for _ in range(2)] == [False, True]


def test_others_in_the_same_rows_begin_anew():
    decodes = Decodes([5, 5])
    assert [decodes.step() for _ in range(2)] == [False, True]
    assert not decodes.step([1, 0]), "in another order"
    assert decodes.step([1, 0])
    decodes.computed = {row: n + 1 for row, n in decodes.computed.items()}
    assert not decodes.step([1, 0]), "a token was computed elsewhere"


def test_what_was_written_over_is_read_again():
    """By another in the blocks of one that ended, at just the length that would go on."""
    decodes = Decodes([5])
    assert [decodes.step() for _ in range(2)] == [False, True]
    blocks = decodes.inputs.block_tables[0, 0, :2].tolist()
    decodes.computed.clear()
    decodes.add(7, blocks, window=2)  # layers with a window do not ask for what is kept
    assert not decodes.step()


def test_no_more_is_kept_than_the_store_holds():
    decodes = Decodes([9] * 3)
    decodes.attention._kept[0].num_slots = 3 * (10 + _SPARE) - 1
    assert [decodes.step() for _ in range(2)] == [False, False]
