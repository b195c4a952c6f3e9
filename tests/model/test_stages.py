"""Stages of a model in several processes give the whole model's logits."""

import numpy as np
import pytest

from tests.support.engine import rank_processes
from tests.support.models import tiny_models as tiny
from tests.support.models.configs import config_of
from vllm_metal_lite.attention.sdpa.reference import ReferenceAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.distributed import RankGroup
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.model import loader, stages, trial
from vllm_metal_lite.model.layout import find_layout

HERE = "tests.model.test_stages"
# Layers of one kind, an odd number of them, windows, experts, latents, recurrent layers; and some
# that mlx-lm cannot shard.
MODELS = [
    "llama", "llama/q4", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5", "gemma3_text",
    "mamba2",
]  # fmt: skip
SEQUENCES = [np.arange(n) * 7 % 90 for n in trial.LENGTHS]


def packed_logits(loaded):
    """Rows of all steps of the trial: prompts, chunks and decodes beside each other."""
    packed = loaded.packed
    store = PagedStore(loaded.kv_specs, 4, trial.BLOCK, states=packed.state_store(2))
    rows = []
    for *_, logits, state in trial.built_steps(packed, ReferenceAttention(store), SEQUENCES):
        mx.eval(logits, state, store.states.arrays)
        rows += logits.tolist()
    return rows


def stage_logits(ranks, names):
    """By model: the logits, bytes of weights, layers that keep K and V or states."""
    ranks, found = RankGroup(ranks.group, stages=True), {}
    for name in names:
        config = config_of(name)
        model = tiny.build(config)
        stages.keep_stage(model, config["model_type"], ranks)
        loaded = loader.from_model(model, None, config, name, ranks=ranks)
        kept = len(loaded.kv_specs), loaded.packed.layout.num_recurrent_layers
        found[name] = packed_logits(loaded), loaded.weight_bytes, kept
    return found


@pytest.mark.parametrize(
    ("size", "names"), [(2, MODELS), pytest.param(3, ["llama"], marks=pytest.mark.long)]
)
def test_stages_give_the_whole_models_logits(size, names):
    results = rank_processes.run(f"{HERE}:stage_logits", size, names)
    for name in names:
        whole = tiny.load(name)
        logits, weights, kept = zip(*(rank[name] for rank in results), strict=True)
        np.testing.assert_allclose(logits[-1], packed_logits(whole), atol=2e-4, err_msg=name)
        assert max(weights) < whole.weight_bytes
        assert sum(num for num, _ in kept) == len(whole.kv_specs)


class Stage(RankGroup):
    """A stage of several that sends and receives nothing; the others report `others`."""

    def __init__(self, size, others=(), rank=0):
        super().__init__(stages=True)
        self.size, self.others, self.rank = size, others, rank

    def gather(self, value):
        return [value, *self.others]


def test_numbers_of_layers_differ_by_at_most_one():
    config = config_of("llama", num_hidden_layers=10)
    kept = []
    for rank in range(4):
        model = tiny.build(config)
        stages.keep_stage(model, "llama", Stage(4, rank=rank))
        kept.append(sum(not isinstance(layer, stages.Absent) for layer in model.layers))
    assert kept == [3, 2, 3, 2]


@pytest.mark.parametrize(("name", "size", "reason"), [
    ("llama", 4, "llama cannot be divided into 4 stages: it has 3 layers"),
    ("gpt2", 2, "gpt2 cannot be divided into 2 stages: it has no list of layers"),
    ("nanbeige", 2, "its layers do not run once each, in order"),
    ("exaone4", 2, "exaone4 cannot be divided into 2 stages: 'Absent' object has no attribute"),
    ("gemma3n", 2, "gemma3n cannot be divided into 2 stages: 'NoneType' object"),
])  # fmt: skip
def test_what_is_no_chain_of_layers_is_refused(name, size, reason):
    config = config_of(name)
    with pytest.raises(ModelLoadError) as caught:
        stages.keep_stage(tiny.build(config), config["model_type"], Stage(size))
    assert reason in str(caught.value)


def test_stages_of_unlike_kinds_are_refused():
    layout = find_layout(tiny.build(config_of("llama")), "llama")
    with pytest.raises(ModelLoadError, match="no layer of stage 1 keeps K and V"):
        stages.check_kinds(layout, "llama", Stage(2, others=[[False, False]]))
