"""ForwardBatch and the host table that it is cut from."""

from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal_lite.attention.step_arrays import prompts_of
from vllm_metal_lite.batch.forward_batch import UNKNOWN_TOKEN, ForwardBatch
from vllm_metal_lite.batch.input_batch import InputBatch

MAX_SEQS, MAX_LEN, BLOCK_SIZE, NUM_BLOCKS = 6, 48, 8, 300
Request = namedtuple("Request", "seat tokens prompt scored_from tables")


@st.composite
def tables(draw) -> tuple[InputBatch, list[Request]]:
    """A table with a random history of requests, and its expected content as plain values."""
    inputs = InputBatch(MAX_SEQS, MAX_LEN, BLOCK_SIZE, num_kv_groups=draw(st.integers(1, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    blocks = rng.permutation(NUM_BLOCKS).tolist()
    requests = []
    for _ in range(draw(st.integers(1, MAX_SEQS + 4))):
        if requests and (len(requests) == MAX_SEQS or draw(st.booleans())):
            inputs.remove(requests.pop(draw(st.integers(0, len(requests) - 1))).seat)
        tokens = rng.integers(0, 100, draw(st.integers(1, MAX_LEN))).tolist()
        prompt = draw(st.integers(1, len(tokens)))
        scored_from = draw(st.none() | st.integers(0, prompt - 1))
        seat = inputs.add(tokens, prompt, scored_from)
        count = -(-len(tokens) // BLOCK_SIZE)
        tables = [[blocks.pop() for _ in range(count)] for _ in inputs.block_tables]
        cut = draw(st.integers(0, count))
        inputs.append_blocks(seat, *(t[:cut] for t in tables))
        inputs.append_blocks(seat, *(t[cut:] for t in tables))
        requests.append(Request(seat, tokens, prompt, scored_from, tables))
    return inputs, requests


@given(tables(), st.data())
@settings(max_examples=60)
def test_pack_equals_a_plain_loop(filled, data):
    inputs, requests = filled
    chosen = data.draw(st.permutations(requests))[: data.draw(st.integers(1, len(requests)))]
    spans = []
    for r in chosen:
        start = data.draw(st.integers(0, len(r.tokens) - 1))
        spans.append((r, start, data.draw(st.integers(1, len(r.tokens) - start))))
    spans.sort(key=lambda span: span[2] > 1)
    batch = inputs.pack(
        np.array([r.seat for r, _, _ in spans]),
        np.array([start for _, start, _ in spans]),
        np.array([count for _, _, count in spans]),
    )
    batch.validate(*[NUM_BLOCKS] * len(inputs.block_tables))

    tokens, positions, cu, last_rows, samples, scored = [], [], [0], [], [], []
    slots = [[] for _ in batch.block_tables]
    for i, (r, start, count) in enumerate(spans):
        for p in range(start, start + count):
            if r.scored_from is not None and r.scored_from <= p and p + 1 < r.prompt:
                scored.append((len(tokens), r.tokens[p + 1], i))
            tokens.append(r.tokens[p])
            positions.append(p)
            for group, table in zip(slots, r.tables, strict=True):
                group.append(table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE)
        cu.append(len(tokens))
        if start + count == len(r.tokens):
            samples.append(i)
            last_rows.append(len(tokens) - 1)
        used = -(-(start + count) // BLOCK_SIZE)
        assert batch.block_tables[:, i, :used].tolist() == [t[:used] for t in r.tables]
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert [batch.slot_mapping(group).tolist() for group in range(len(slots))] == slots
    assert batch.cu_seqlens_q.tolist() == cu
    assert batch.seq_lens.tolist() == [start + count for _, start, count in spans]
    assert batch.num_decodes == sum(count == 1 for _, _, count in spans)
    assert batch.sample_segments.tolist() == samples
    assert batch.logits_indices.tolist() == last_rows + [row for row, _, _ in scored]
    assert batch.prompt_targets.tolist() == [t for _, t, _ in scored]
    assert batch.prompt_segments.tolist() == [i for _, _, i in scored]
    assert all(
        getattr(batch, name).dtype == np.int32
        for name in ForwardBatch.__slots__
        if name not in ("block_size", "num_decodes", "pooled", "rotary_positions", "pictures")
    )


def good_batch() -> ForwardBatch:
    inputs = InputBatch(3, 32, 8)
    seats = []
    for count, blocks in ((9, [3, 1]), (4, [0]), (20, [4, 6, 2])):
        seats.append(inputs.add([5] * count, count))
        inputs.append_blocks(seats[-1], blocks)
    batch = inputs.pack(np.array(seats), np.array([8, 0, 10]), np.array([1, 4, 10]))
    batch.validate(7)
    return batch


def changed(array: np.ndarray, index: object, value: int) -> np.ndarray:
    """A copy with another value at an index."""
    array = array.copy()
    array[index] = value
    return array


BAD = {
    "an empty segment": lambda b: {"cu_seqlens_q": changed(b.cu_seqlens_q, 1, 0)},
    "falling": lambda b: {"cu_seqlens_q": np.array([0, 5, 1, 15], np.int32)},
    "a block table too narrow": lambda b: {"block_tables": b.block_tables[..., :2]},
    "a block behind the store": lambda b: {"block_tables": changed(b.block_tables, (0, 2, 1), 7)},
    "a block before the store": lambda b: {"block_tables": changed(b.block_tables, (0, 2, 1), -1)},
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_batch_is_refused_before_anything_is_computed(fault):
    batch = good_batch()
    with pytest.raises(ValueError, match=r"\w"):
        replace(batch, **BAD[fault](batch)).validate(7)


def test_each_kv_group_is_held_to_its_own_store():
    batch = good_batch()
    both = replace(batch, block_tables=batch.block_tables.repeat(2, axis=0))
    both.validate(7, 8)
    for num_blocks in ((7,), (7, 6), (7, 7, 7)):
        with pytest.raises(ValueError, match=r"KV groups|outside the store of (6|48)"):
            both.validate(*num_blocks)


def test_the_prompts_of_a_step_are_those_of_every_kv_group():
    batch = good_batch()
    tables = np.concatenate([batch.block_tables, batch.block_tables + 1])
    other = replace(batch, block_tables=tables[1:])
    prompts = prompts_of(replace(batch, block_tables=tables), 1)
    assert prompts.slot_mapping(1).tolist() == other.slot_mapping()[1:].tolist()
    assert prompts.block_tables.tolist() == tables[:, 1:].tolist()


def test_entries_of_a_block_table_behind_the_sequence_may_be_anything():
    batch = good_batch()
    replace(batch, block_tables=changed(batch.block_tables, (0, 1, 1), 999)).validate(7)


def test_seats_are_given_back_and_the_next_owner_finds_them_clean():
    inputs = InputBatch(1, 16, 8)
    seat = inputs.add([1] * 12, 12, prompt_logprobs_from=0)
    inputs.append_blocks(seat, [5, 6])
    inputs.remove(seat)
    assert inputs.add([2, 3], 2) == seat
    inputs.append_blocks(seat, [9])
    batch = inputs.pack(np.array([seat]), np.array([0]), np.array([2]))
    assert batch.token_ids.tolist() == [2, 3]
    assert batch.slot_mapping().tolist() == [72, 73]
    assert not len(batch.prompt_targets)


def test_a_token_is_filled_in_where_one_is_unknown_unless_the_seat_is_anothers_by_then():
    inputs = InputBatch(3, 3, 8)
    seats = np.array([inputs.add([i, i], 2) for i in range(3)])
    inputs.append_tokens(seats, np.full(3, UNKNOWN_TOKEN))
    inputs.remove(seats[1])
    assert inputs.add([7], 1) == seats[1]
    inputs.remove(seats[2])
    inputs.fill_tokens(seats, np.array([4, 5, 6]))
    inputs.replace_unknown(seats[2], [6, 7])
    assert inputs.token_ids[seats[0], :3].tolist() == [0, 0, 4]
    assert inputs.token_ids[seats[1], 0] == 7
    assert inputs.token_ids[seats[2]].tolist() == [2, 2, UNKNOWN_TOKEN]
    assert inputs.num_tokens[seats].tolist() == [3, 1, 0]


def test_append_tokens_stops_at_the_end_of_the_context():
    inputs = InputBatch(2, 4, 8)
    seats = np.array([inputs.add([1, 2, 3, 4], 4), inputs.add([7], 1)])
    inputs.append_tokens(seats, np.array([8, 9]))
    assert inputs.num_tokens[seats].tolist() == [4, 2]
    assert inputs.token_ids[seats[1], :2].tolist() == [7, 9]
