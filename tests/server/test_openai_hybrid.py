"""A model with recurrent layers behind OpenAI's API: its greedy tokens are those embedded."""

import httpx
import pytest

from tests.support.models.tiny_models import write_folder
from tests.support.server.kit import serving
from vllm_metal_lite import LLM, EngineConfig, SamplingParams
from vllm_metal_lite.server.models import ModelSpec

OPTIONS = {
    "num_blocks": 64, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "max_model_len": 128,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_greedy_tokens_are_those_of_the_embedded_engine(tmp_path, name):
    folder = str(write_folder(tmp_path / name, name))
    prompts = [list(range(3, 40)), [5, 6, 7], list(range(60, 20, -1))]
    llm = LLM(folder, **OPTIONS)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [
        [f"token_id:{token_id}" for token_id in output.outputs[0].token_ids]
        for output in llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False
        )
    ]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    body |= {"logprobs": 0, "return_tokens_as_token_ids": True}
    chat = {"messages": [{"role": "user", "content": "one " * 12}], "max_tokens": 4}
    with (
        serving([ModelSpec("hybrid", folder)], EngineConfig(**OPTIONS)) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        for _ in range(2):  # the second time, prefixes are cached
            answer = client.post("/v1/completions", json=body).json()
            assert [choice["logprobs"]["tokens"] for choice in answer["choices"]] == expected
        texts = set()
        for _ in range(2):
            answer = client.post("/v1/chat/completions", json={**chat, "temperature": 0}).json()
            texts.add(answer["choices"][0]["message"]["content"])
        assert len(texts) == 1
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
