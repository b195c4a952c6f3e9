"""vLLM's KV cache groups: windowed layers beside full ones, with block tables of their own."""

import pytest

from tests.vllm_plugin import kit
from tests.vllm_plugin.test_greedy import CHUNKS, PLAIN, SHARED, check, check_every_way
from vllm_metal_lite.fusion.launches import FusedLaunches
from vllm_metal_lite.vllm_plugin.kv_layers import KVLayers

# A request takes 13 blocks of the full group; of two others, what a window and a step touch.
TINY_POOL = {"num_gpu_blocks_override": 60}


def num_groups(llm) -> int:
    return len(kit.core(llm).scheduler.kv_cache_config.kv_cache_groups)


def most_used(llm, prompt) -> int:
    """The most blocks of vLLM's pool that were in use while this was served."""
    pool = kit.core(llm).scheduler.kv_cache_manager.block_pool
    allocate, free = pool.get_new_blocks, []

    def counting(*args):
        blocks = allocate(*args)
        free.append(pool.get_num_free_blocks())
        return blocks

    pool.get_new_blocks = counting
    kit.generate(llm, [prompt], max_tokens=40)
    return pool.num_gpu_blocks - 1 - min(free)


def test_one_group_where_the_reference_writes():
    """Layers that share an array would copy it at each write."""
    with kit.engine("gemma3_text") as llm:
        assert num_groups(llm) == 1


def test_every_way_of_scheduling(monkeypatch):
    """Over the reference attention, which copies whole arrays here: tokens are the same."""
    monkeypatch.setattr(KVLayers, "may_share_arrays", lambda self, *args: True)
    name = "gemma3_text"
    with kit.engine(name) as llm:
        assert num_groups(llm) > 1
        keys = kit.worker(llm).runner.attention.store.keys
        assert len({id(a) for a in keys}) < len(keys)
    check_every_way(name, TINY_POOL, hits=4, hits_in_tiny_pool=0)


def test_kernels_share_arrays_and_windows_cost_less(kernels):
    name, used = "gemma3_text", []
    for disabled in (True, False):
        options = {"disable_hybrid_kv_cache_manager": disabled, "enable_prefix_caching": False}
        with kit.engine(name, **CHUNKS, **options) as llm:
            assert (num_groups(llm) > 1) != disabled
            assert kit.worker(llm).runner.attention.name == "kernels"
            check(llm, name, PLAIN[:4])
            assert kit.worker(llm).pipeline.num_ahead > 20
            groups = kit.core(llm).scheduler.kv_cache_config.kv_cache_groups
            layers = max(len(g.layer_names) for g in groups)  # arrays that a block lies in
            used.append(layers * most_used(llm, SHARED[0]))
    assert used[1] < 0.8 * used[0]


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_launches_are_fused_beside_windows(kernels, name):
    """The trial's store has one group, and full layers are in vLLM's second."""
    with kit.engine(name) as llm:
        assert num_groups(llm) > 1
        assert isinstance(kit.worker(llm).runner.path.fusion, FusedLaunches)
