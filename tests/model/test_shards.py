"""Shards of a model in several processes give one rank's answers."""

from types import SimpleNamespace

import mlx.nn as nn
import numpy as np
import pytest

from tests.support.engine import rank_processes
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import ALONE, RankGroup
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.model import loader, shards, trial
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.sampling_params import SamplingParams

HERE = "tests.model.test_shards"
# Ranks share its head too, so the vocabulary must divide.
_EVEN = {"text_config": config_of("qwen3_5")["text_config"] | {"vocab_size": 102}}
# Each with the changes of its configuration that let two ranks share it.
MODELS = {
    "llama": {}, "llama/q4": {"intermediate_size": 128}, "qwen3": {}, "qwen3_moe": {},
    "gpt_oss": {}, "deepseek_v3": {}, "qwen3_5": _EVEN,
}  # fmt: skip
PROMPTS = [p[:1] * 3 + p for p in tiny.prompts(5, 1, 40, seed=5)]
NUM_TOKENS = 12
LOADS = {"plain": {}, "chunks, preempted": {"max_num_batched_tokens": 8, "num_blocks": 17}}


def shard(ranks, name, half=False, **changes):
    """A tiny model's shard, in float16 if `half`."""
    config = config_of(name, **changes)
    model = tiny.build(config)
    if half:
        model.set_dtype(mx.float16)
    if ranks.size > 1:
        shards.shard(model, config["model_type"], ranks)
    return loader.from_model(model, None, config, name, ranks=ranks)


def seeded(count, max_tokens, **more):
    """Parameters of greedy requests and of others, in turns."""
    how = {"max_tokens": max_tokens, "ignore_eos": True, **more}
    return [SamplingParams(temperature=0.9 * (1 - i % 2), seed=i, **how) for i in range(count)]


def answers(ranks, models):
    """By model: tokens of each load, the K/V heads of each layer, bytes of weights."""
    found = {}
    for name, changes in models.items():
        model, tokens = shard(ranks, name, **changes), {}
        for load, options in LOADS.items():
            engine = tiny.engine(model, **{"max_model_len": 128, **options})
            tokens[load] = tiny.answers(engine, PROMPTS, seeded(len(PROMPTS), NUM_TOKENS))
        heads = [spec.num_kv_heads for spec in model.kv_specs]
        found[name] = {"tokens": tokens, "heads": heads, "bytes": model.weight_bytes}
    return found


@pytest.mark.parametrize(
    ("size", "models"),
    [
        (2, {"gpt_oss": {}, "deepseek_v3": {}}),
        pytest.param(2, MODELS, marks=pytest.mark.thorough),
        pytest.param(4, {"qwen3": {"num_key_value_heads": 4}}, marks=pytest.mark.thorough),
    ],
)
def test_several_ranks_answer_as_one(size, models):
    results, whole = rank_processes.run(f"{HERE}:answers", size, models), answers(ALONE, models)
    for name, one in whole.items():
        for rank in results:
            assert rank[name]["tokens"] == one["tokens"], name
            # Latents are whole on each rank.
            share = 1 if name == "deepseek_v3" else size
            assert rank[name]["heads"] == [heads // share for heads in one["heads"]]
            assert rank[name]["bytes"] < 0.8 * one["bytes"]


def unlike(ranks):
    """A rank whose measurements say no, and whose device rounds to other tokens."""
    if ranks.rank == 1:
        trial._distance = lambda got, expected: 1e9
    model = shard(ranks, "llama")
    sampler = Sampler(2, model.vocab_size, ranks)
    for row in range(2):
        sampler.add(row, SamplingParams(temperature=0.0), 0, np.zeros(1, int), 1, ())
    logits = mx.zeros((2, model.vocab_size)).at[:, 5 + ranks.rank].add(1.0)
    tokens = sampler(logits, np.arange(2)).for_host.tolist()
    gathered, own = ranks.gather(ranks.rank * "x"), ranks.from_leader("own")
    return [model.packed.by_segment, tokens, gathered, own]


@pytest.mark.long
def test_a_rank_that_measures_and_rounds_otherwise_follows_rank_0():
    for result in rank_processes.run(f"{HERE}:unlike", 2):
        assert result == [None, [5, 5], ["", "x"], "own"]


class Ranks(RankGroup):
    """Rank 0 of several; the others do not exist."""

    def __init__(self, size):
        super().__init__()
        self.size, self.group = size, SimpleNamespace(rank=lambda: 0, size=lambda: size)


@pytest.mark.parametrize(("name", "size", "changes", "reason"), [
    ("gemma2", 2, {}, "gemma2 cannot be shared by 2 ranks: mlx-lm cannot shard this architecture"),
    ("llama", 3, {}, "n_heads of model.layers.2.self_attn is 4, not a multiple of 3"),
    ("llama", 4, {}, "n_kv_heads of model.layers.2.self_attn is 2, not a multiple of 4"),
    ("llama", 2, {"intermediate_size": 97}, "mlp.up_proj has 97 outputs, not a multiple of 2"),
    ("llama/q4", 2, {"intermediate_size": 96},
     "inputs of model.layers.2.mlp.down_proj are 3 groups of 32, not a multiple of 2"),
])  # fmt: skip
def test_what_does_not_divide_is_refused_by_name_and_number(name, size, changes, reason):
    config = config_of(name, **changes)
    with pytest.raises(ModelLoadError) as caught:
        shards.shard(tiny.build(config), config["model_type"], Ranks(size))
    assert reason in str(caught.value)


def test_sharded_layers_become_plain_ones():
    model = tiny.build(config_of("llama"))
    shards.shard(model, "llama", Ranks(2))
    attention = model.model.layers[0].self_attn
    assert type(attention.q_proj) is nn.Linear
    assert type(attention.o_proj) is shards.SummedLinear
    assert type(attention.o_proj.linear) is nn.Linear
