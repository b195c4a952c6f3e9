"""`--runner pooling`: vLLM's embeddings are those of mlx-lm's module alone."""

import numpy as np
import pytest
from vllm.config import PoolerConfig

from tests.support.engine.embeddings import alone, compare
from tests.support.models import tiny_models as tiny
from tests.vllm_plugin import kit
from vllm_metal_lite.model.loader import LoadedModel

PROMPTS = tiny.prompts(8, 1, 60, seed=9)


def embed(llm, prompts) -> list[np.ndarray]:
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
    return [np.array(output.outputs.embedding) for output in outputs]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
def test_embeddings_equal_those_of_the_model_alone(pooling, is_async):
    """In chunks and behind cached prefixes, where vLLM allows these; two fill the context."""
    config = PoolerConfig(seq_pooling_type=pooling)
    longest = tiny.prompts(1, 64, 64)[0]
    prompts = [*PROMPTS, longest, [*longest[:40], 1, 2], longest]
    options = {"max_num_batched_tokens": 24} if pooling == "LAST" else {}
    with kit.engine(
        runner="pooling",
        pooler_config=config,
        max_model_len=64,
        async_scheduling=is_async,
        **options,
    ) as llm:
        wanted = [alone(kit.native("llama"), prompt, pooling.lower()) for prompt in prompts]
        for _ in range(2):
            compare(embed(llm, prompts), wanted)


def test_a_folder_that_cannot_be_followed_is_refused(monkeypatch):
    monkeypatch.setattr(LoadedModel, "no_embeddings", "its attention is bidirectional")
    with pytest.raises(Exception, match="embeddings: its attention"), kit.engine(runner="pooling"):
        pass
