"""A windowed layer stores its window: blocks behind it are released, and never read again."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine.fake_engine import FakeEngine, answer_of, fake_config
from tests.support.engine.poison import poison_free_blocks
from tests.support.engine.pool_accounts import check_accounts
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.describe import describe
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.runner.memory import size_store
from vllm_metal_lite.scheduler.kv_groups import KVGroup, kv_groups
from vllm_metal_lite.scheduler.kv_manager import KVCacheManager
from vllm_metal_lite.scheduler.request import Request

# Most have windows of 17 tokens (9 in /w9) beside full layers; the last two have windows alone.
NAMES = [
    "gemma3_text",
    "gpt_oss",
    "llama/window/w9",
    "llama4",
    "gemma4_text/shared_kv",
    "baichuan_m1",
    "recurrent_gemma",
]


# Groups


def spec(window=None, chunk=None):
    return LayerSpec(1, 8, 8, mx.float32, window, chunk)


def test_layers_that_see_equally_far_back_form_a_group():
    specs = [spec(9), spec(), spec(17), spec(9), spec(chunk=17), spec()]
    assert kv_groups(specs) == [KVGroup((1, 5)), KVGroup((2, 4), 17), KVGroup((0, 3), 9)]
    assert kv_groups([spec(9)]) == [KVGroup((0,), 9)]
    assert kv_groups([]) == [KVGroup()]


@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 30), st.integers(1, 9))
@settings(max_examples=300)
def test_most_blocks_is_the_most_that_a_chunk_can_see(window, start, chunk, block_size):
    """The definition: all blocks with a token that any row of a chunk sees."""
    group = KVGroup(window=window)
    seen = {
        at // block_size
        for row in range(start, start + chunk)
        for at in range(max(row - window + 1, 0), row + 1)
    }
    assert min(seen) == group.first_block(start, block_size)
    assert len(seen) <= group.most_blocks(start + chunk, chunk, block_size)
    reached = max(
        -(-(begin + chunk) // block_size) - group.first_block(begin, block_size)
        for begin in range(window, window + block_size)
    )
    assert reached == group.most_blocks(1 << 20, chunk, block_size)


def test_groups_that_take_blocks_from_one_pool_share_arrays():
    """As in vLLM, layers at the same index of their groups share arrays, in blocks of their own."""
    groups = [KVGroup((1,), num_blocks=4), KVGroup((0, 2), 9, num_blocks=4)]
    store = PagedStore([spec(9), spec(), spec(9)], groups, 8, shared=True)
    assert store.keys[0] is store.keys[1] is not store.keys[2]
    assert store.values[0] is store.values[1] is not store.values[2]
    assert store.nbytes == 2 * 2 * 5 * 8 * 8 * 4  # arrays of K and V, slots, values of 4 bytes
    for layer in range(3):
        row = mx.full((1, 1, 8), layer + 1.0)
        store.write(layer, row, row, mx.array([8 * layer]))
    assert store.keys[0][mx.array([0, 8, 16]), 0, 0].tolist() == [1, 2, 0]
    assert store.keys[2][mx.array([0, 8, 16]), 0, 0].tolist() == [0, 0, 3]


# A request whose context grows


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_windowed_layer_costs_its_window_while_the_context_grows(name, ahead):
    engine = tiny.engine(name, num_blocks=40, max_num_batched_tokens=24, max_model_len=256)
    tiny.run_ahead(engine, ahead)
    poison_free_blocks(engine)
    prompt = tiny.prompts(1, 100, 100, seed=3)[0]
    engine.add_request("a", prompt, tiny.greedy(60, ignore_eos=True))
    request = engine._answers["a"].request
    tokens, most = [], {}
    while engine.has_unfinished_requests():
        tokens = engine.step()[-1:] or tokens
        check_accounts(engine.scheduler.kv, [a.request for a in engine._answers.values()])
        for group, table in zip(engine.kv_groups, request.block_tables, strict=False):
            chunk = 24 if request.num_tokens == 100 else 1
            assert table.num_owned <= group.most_blocks(160, chunk, 8)
            if request.num_tokens > 110:
                most[group.window] = max(most.get(group.window, 0), table.num_owned)
    assert tokens[0].outputs[0].token_ids == tiny.alone(tiny.native(name), prompt, 60)
    # 159 tokens are in 20 blocks.  The full group keeps all, the others what their windows touch.
    assert most == {
        g.window: 20 if g.window is None else -(-(g.window - 1) // 8) + 1 for g in engine.kv_groups
    }


def test_a_context_may_be_longer_than_all_blocks_where_every_layer_has_a_window():
    name = "recurrent_gemma"
    engine = tiny.engine(name, num_blocks=5, max_num_batched_tokens=16, max_model_len=200)
    assert engine.max_model_len == 200
    poison_free_blocks(engine)
    prompts = tiny.prompts(2, 70, 90, seed=4)
    answers = tiny.answers(engine, prompts, tiny.greedy(100))
    assert answers == tiny.all_alone(name, prompts, 100)
    assert engine.metrics()["blocks_peak_owned"] <= 5


# Prefixes


def manager(*windows, num_blocks=40) -> KVCacheManager:
    groups = [KVGroup(window=w, num_blocks=num_blocks) for w in windows]
    return KVCacheManager(groups, 4, enable_caching=True)


def stored(kv: KVCacheManager, num_tokens: int) -> Request:
    """A request whose tokens were all computed in chunks of 4."""
    request = Request("a", list(range(num_tokens)), 1)
    kv.admit(request, kv.find_prefix(request))
    for start in range(0, num_tokens, 4):
        kv.allocate(request, start, start + 4)
        kv.name_blocks(request, start, start + 4)
    return request


def test_a_hit_owns_of_a_windowed_group_what_its_next_token_sees():
    kv = manager(None, 6, 1)
    kv.free(stored(kv, 40))
    request = Request("b", [*range(30), 99], 1)
    hit = kv.find_prefix(request)
    full, window, own = hit.tables
    assert (len(full.block_ids), full.num_given_back) == (7, 0)  # 28 tokens
    assert (len(window.block_ids), window.num_given_back) == (7, 5)  # tokens 23 to 27
    assert (len(own.block_ids), own.num_given_back) == (7, 7)
    request.num_computed_tokens = hit.num_tokens
    kv.admit(request, hit)
    assert [pool.num_owned for pool in kv.pools] == [7, 2, 0]
    check_accounts(kv, [request])


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=12),
    st.integers(1, 30),
    st.integers(1, 30),
)
@settings(max_examples=200)
def test_the_longest_prefix_that_all_groups_hold_is_found(evicted, first, second):
    windows = (None, first, second)
    kv = manager(*windows)
    request = stored(kv, 40)
    held = [set(range(10)) for _ in windows]
    blocks = [list(t.block_ids) for t in request.block_tables]
    kv.free(request)
    for group, i in evicted:
        kv.unname([(group, blocks[group][i])])
        held[group].discard(i)

    def holds(length: int) -> bool:
        return all(
            set(range(0 if w is None else max(length * 4 - w + 1, 0) // 4, length)) <= blocks
            for w, blocks in zip(windows, held, strict=True)
        )

    expected = max(length for length in range(11) if holds(length))
    tables = kv.find_prefix(Request("b", [*range(40), 99], 1)).tables
    assert {len(t.block_ids) for t in tables} == {expected}


def test_names_behind_a_window_are_found_until_they_are_needed():
    config = fake_config(4, max_num_batched_tokens=48, max_num_seqs=4)
    groups = [KVGroup(num_blocks=40), KVGroup(window=6, num_blocks=12)]
    engine = FakeEngine(config, groups, 200)
    stem = list(range(20))
    engine.add(stem, max_tokens=8)
    engine.run()
    short = engine.add([*stem[:12], 99], max_tokens=1)
    engine.run()
    assert short.num_cached_tokens == 12
    engine.add([500 + i for i in range(60)], max_tokens=4)  # evicts in the windowed group alone
    engine.run()
    again = engine.add([*stem[:12], 98], max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 0
    assert all(pool.num_owned == 0 for pool in engine.scheduler.kv.pools)


# Conversations


def cached_tokens(engine: FakeEngine, users: int, at_once: int, is_chat: bool) -> list[int]:
    """The cached tokens of five turns of each user, who share a system prompt of 40 tokens.

    is_chat: an answer is written anew, so that the next turn differs from the generation prompt on.
    """
    rng, found = Random(1), []

    def new(least: int, most: int) -> list[int]:
        return [rng.randrange(4000) for _ in range(rng.randint(least, most))]

    system = new(40, 40)
    chats = [system] * users
    for _ in range(5):
        for first in range(0, users, at_once):
            turn = {}
            for i in range(first, min(first + at_once, users)):
                prompt = chats[i] = chats[i] + new(20, 60)
                named = {"checkpoints": (40, len(prompt) - 1)} if is_chat else {}
                turn[i] = engine.add([*prompt, 1, 2, 3], rng.randint(5, 20), **named)
            engine.run()
            for i, request in turn.items():
                found.append(request.num_cached_tokens)
                again = new(5, 15) if is_chat else answer_of(request)
                chats[i] = chats[i] + ([] if is_chat else [1, 2, 3]) + again
    return found


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("users", [4, 5, 6, 8, 12])
def test_windows_cost_idle_conversations_no_cached_token(users, at_once, is_chat):
    """A store of 8,000 tokens and four seats: cached is what a model without windows caches."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    groups, _, _ = size_store(
        tiny.packed("gemma3_text"), EngineConfig(block_size=8, num_blocks=1000, **options)
    )
    config, length = fake_config(8, **options), 1000
    engines = [FakeEngine(config, kind, length) for kind in (groups, 1000)]
    found, without = (cached_tokens(engine, users, at_once, is_chat) for engine in engines)
    assert found == without
    assert engines[0].scheduler.counts.prefix_cache_lost_tokens == 0


def test_tokens_that_a_missing_window_loses_are_counted():
    config = fake_config(4, max_num_batched_tokens=64, max_num_seqs=4)
    engine = FakeEngine(config, [KVGroup(num_blocks=60), KVGroup(window=6, num_blocks=20)], 200)
    engine.add(list(range(30)), max_tokens=1)
    engine.run()
    engine.add([500 + i for i in range(64)], max_tokens=4)
    engine.add([900 + i for i in range(64)], max_tokens=4)
    engine.run()
    again = engine.add(list(range(30)), max_tokens=1)
    engine.run()
    assert (again.num_cached_tokens, engine.scheduler.counts.prefix_cache_lost_tokens) == (0, 28)


@pytest.mark.parametrize("named", [False, True])
def test_a_window_that_requests_start_from_is_kept_for_others(named):
    """A system prompt of 16 tokens; between two requests that start behind it comes another one."""
    config = fake_config(4, max_num_batched_tokens=64, max_num_seqs=4)
    engine = FakeEngine(config, [KVGroup(num_blocks=200), KVGroup(window=6, num_blocks=20)], 200)
    system = list(range(16))
    for i in range(1, 9):
        how = {"checkpoints": [16]} if named else {}
        request = engine.add([*system, *range(100 * i, 100 * i + 20)], max_tokens=1, **how)
        engine.run()
        engine.add(list(range(100 * i + 50, 100 * i + 90)), max_tokens=1)
        engine.run()
        assert request.num_cached_tokens == (16 if i > 1 else 0)


def test_a_position_that_turns_name_counts_as_used():
    """One conversation starts behind its last answer, but names the end of the system prompt."""
    config = fake_config(4, max_num_batched_tokens=32, max_num_seqs=1)
    engine = FakeEngine(config, [KVGroup(num_blocks=200), KVGroup(window=6, num_blocks=16)], 500)
    system = list(range(16))
    chat = engine.add([*system, *range(100, 110)], max_tokens=4, checkpoints=[16])
    engine.run()
    for i in range(2, 20):
        before = len(chat.token_ids)
        prompt = [*chat.token_ids, *range(100 * i, 100 * i + 10)]
        chat = engine.add(prompt, max_tokens=4, checkpoints=[16])
        engine.run()
        assert chat.num_cached_tokens == (before - 1) // 4 * 4
    other = engine.add([*system, 99, 98], max_tokens=1)
    engine.run()
    assert other.num_cached_tokens == 16


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "llama"])
@pytest.mark.parametrize("caching", [True, False])
def test_chats_name_positions_where_only_some_can_be_started_from(name, caching):
    engine = tiny.engine(name, num_blocks=40, enable_prefix_caching=caching)
    assert engine.scheduler.kv.uses_checkpoints is (caching and name != "llama")


# What the user is told


def test_the_start_up_lines_tell_what_windows_hold(tmp_path):
    folder = tiny.write_folder(tmp_path / "tiny", "gemma3_text")
    options = {"num_blocks": 100, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    config = EngineConfig(block_size=8, enable_prefix_caching=False, **options)
    lines = list(describe(LLMEngine.from_name(str(folder), config)))
    assert any("store holds 800 (100 blocks of 8" in line for line in lines)
    # 3 blocks a seat; 64 tokens of a step, and a block more a seat.
    assert "Windows:   2 layers see 17 tokens; for them the store holds 192" in lines


# What can never finish


def test_what_a_window_cannot_take_is_refused():
    config = fake_config(4, max_num_batched_tokens=32)
    engine = FakeEngine(config, [KVGroup(num_blocks=40), KVGroup(window=9, num_blocks=3)], 120)
    engine.add(list(range(50)), max_tokens=30)  # 3 blocks are what a window of 9 touches
    engine.run()
    engine = FakeEngine(config, [KVGroup(num_blocks=40), KVGroup(window=10, num_blocks=3)], 120)
    with pytest.raises(RequestError, match="needs 4 blocks of 4 tokens; the store has 3"):
        engine.add(list(range(50)), max_tokens=30)


def test_a_prompts_blocks_are_given_back_before_its_first_decode():
    """Otherwise another request that needs a block would preempt this one."""
    config = fake_config(4, max_num_batched_tokens=32)
    engine = FakeEngine(config, [KVGroup(num_blocks=40), KVGroup(window=5, num_blocks=12)], 120)
    request = engine.add(list(range(30)), max_tokens=9)
    engine.step()
    assert [t.num_owned for t in request.block_tables] == [8, 2]
    seat = engine.in_flight.seats.req_index[request]
    assert np.array_equal(engine.in_flight.inputs.num_blocks[seat], 8)
