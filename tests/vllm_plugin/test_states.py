"""Models with recurrent states under vLLM: its block manager gives out our state slots."""

import random

import pytest

from tests.vllm_plugin import kit
from tests.vllm_plugin.test_greedy import (
    CHUNKS,
    NUM_TOKENS,
    PLAIN,
    PREFIX,
    SHARED,
    TINY_POOL,
    check,
)
from vllm_metal_lite.batch.forward_batch import SegmentState
from vllm_metal_lite.vllm_plugin import kv_layers, state_slot_manager, worker
from vllm_metal_lite.vllm_plugin.translate import segment_slots

NAME = "qwen3_next"
# vLLM itself turns the cache off for models without attention.
CACHED = {"enable_prefix_caching": True}

own_pool = pytest.mark.skipif(
    not state_slot_manager.has_own_pool(), reason="this vLLM has one pool of blocks"
)


def few_slots(monkeypatch, num_slots):
    plan = worker.plan_memory
    monkeypatch.setattr(
        worker, "plan_memory", lambda *a: plan(*a)._replace(num_state_slots=num_slots)
    )


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 3, (-1, 4, [])),
        (0, 8, (-1, 4, [])),
        (3, 4, (4, 4, [])),
        (8, 9, (4, 6, [])),
        (8, 30, (4, 8, [(24, 7)])),  # column 2 keeps the state after 24 tokens
        (0, 30, (-1, 8, [(8, 4), (16, 6), (24, 7)])),
    ],
)
def test_a_segment_finds_its_slots_in_the_blocks_of_vllm(start, end, expected):
    blocks = [5, 7, 8, 9] if end < 30 or start == 0 else [5, 0, 8, 9]
    assert segment_slots(blocks, start, end, 8) == SegmentState(*expected)


@own_pool
@pytest.mark.parametrize("name", kit.RECURRENT)
def test_every_way_of_scheduling(name):
    kit.skip_if_vllm_cannot_read(name)
    with kit.engine(name, **CACHED) as llm:
        check(llm, name, SHARED[:4])
        # All find the prefix, and the first four find their own prompts.
        check(llm, name, SHARED, min_hits=8 * len(PREFIX))
    with kit.engine(name, **CHUNKS, **CACHED, async_scheduling=False) as llm:
        check(llm, name, SHARED[:4])
        check(llm, name, SHARED, min_hits=8 * len(PREFIX))
    with kit.engine(name, **TINY_POOL, **CACHED) as llm:
        check(llm, name, PLAIN, min_preemptions=3)
        check(llm, name, SHARED, min_preemptions=1)


@own_pool
def test_the_other_dialect_of_the_scheduler(monkeypatch):
    kit.use_dialect(monkeypatch, "1")
    with kit.engine(NAME, **TINY_POOL) as llm:
        check(llm, NAME, PLAIN, min_preemptions=3)
        check(llm, NAME, SHARED, min_preemptions=1)


@own_pool
@pytest.mark.parametrize("num_slots", [state_slot_manager.MAX_SLOTS_PER_REQUEST, 9])
def test_few_slots_make_requests_wait(monkeypatch, num_slots):
    few_slots(monkeypatch, num_slots)
    with kit.engine(NAME) as llm:
        assert kit.worker(llm).runner.attention.store.states.num_slots == num_slots
        check(llm, NAME, SHARED)
        check(llm, NAME, SHARED)


@own_pool
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_next_turn_goes_on_from_the_answer(is_async):
    with kit.engine(NAME, max_model_len=256, async_scheduling=is_async) as llm:
        turn, known = list(PREFIX), 0
        for _ in range(3):
            check(llm, NAME, [turn], min_hits=known // 8 * 8)
            turn = turn + kit.alone(NAME, turn, NUM_TOKENS)
            # The last token of an answer is never computed.
            known = len(turn) - 1
            turn += PREFIX[:9]
            (pool,) = kit.block_pools(llm)[1:]
            assert len(pool.cached_block_hash_to_block) <= 2 * (1 + len(turn) // NUM_TOKENS)


@own_pool
def test_a_reset_and_a_sleep_forget_the_states():
    with kit.engine(NAME, enable_sleep_mode=True) as llm:
        for level in (None, 1, 2):
            check(llm, NAME, SHARED[:2])
            if level is None:
                assert llm.reset_prefix_cache()
            else:
                llm.sleep(level=level)
                llm.wake_up()
            outputs = kit.generate(llm, SHARED[:1], max_tokens=4)
            assert kit.prefix_hits(outputs) == 0


@own_pool
def test_kernels_write_checkpoints_in_place(kernels):
    with kit.engine(NAME) as llm:
        assert kit.worker(llm).runner.attention.name == "kernels"
        check(llm, NAME, SHARED[:4])
        check(llm, NAME, SHARED, min_hits=8 * len(PREFIX))


def test_a_vllm_with_one_pool_serves_without_the_cache(monkeypatch):
    monkeypatch.setattr(kv_layers, "has_own_pool", lambda: False)
    with kit.engine(NAME, **TINY_POOL, **CHUNKS) as llm:
        check(llm, NAME, SHARED[:4], min_preemptions=1)
        assert kit.prefix_hits(kit.generate(llm, SHARED[:4], max_tokens=4)) == 0
        assert len(kit.block_pools(llm)) == 1


@own_pool
@pytest.mark.parametrize(("seed", "num_slots"), [(0, 7), (1, 20)])
def test_forks_and_aborts(monkeypatch, seed, num_slots):
    """Requests leave a known prompt anywhere, and many are aborted."""
    few_slots(monkeypatch, num_slots)
    rng = random.Random(seed)
    prompts, expected, outputs, hits = [list(PREFIX)], {}, {}, 0
    with kit.engine(NAME, num_gpu_blocks_override=60, max_num_batched_tokens=32) as llm:
        engine = llm.llm_engine
        for step in range(150):
            if step % 4 == 0 and step < 100:
                fork = rng.choice(prompts)
                prompt = fork[: rng.randint(1, len(fork))] + rng.choice(PLAIN)[: rng.randint(1, 20)]
                prompts.append(prompt[:70])
                n = rng.randint(1, 30)
                expected[str(step)] = kit.alone(NAME, prompts[-1], n)
                kit.add(llm, str(step), prompts[-1], max_tokens=n)
            if rng.random() < 0.05 and expected.keys() - outputs:
                engine.abort_request([rng.choice(sorted(expected.keys() - outputs))])
            for output in engine.step():
                if output.finished and output.outputs[0].finish_reason != "abort":
                    outputs[output.request_id] = list(output.outputs[0].token_ids)
                    hits += output.num_cached_tokens
        outputs |= {name: list(o.outputs[0].token_ids) for name, o in kit.run(llm).items()}
    assert outputs == {req_id: expected[req_id] for req_id in outputs}
    assert len(outputs) > 15
    assert hits
