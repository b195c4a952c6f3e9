"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`, as clients see them, beside the Python API."""

import base64
from dataclasses import replace

import numpy as np
import openai
import pytest

from vllm_metal_lite import LLM, EngineConfig, PoolingParams
from vllm_metal_lite.model.files.pooling_config import PoolingConfig
from vllm_metal_lite.server.openai_api import pooling as module
from vllm_metal_lite.server.openai_api import prompts

ENGINE = {"num_blocks": 256, "max_model_len": 128}
SERVING = {"engine": EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, **ENGINE)}
TEXTS = ["Once upon a time", "A dog", "The sun was warm, and Lily went to the park"]


@pytest.fixture(scope="module")
def client(running):
    """Not strict: the client itself asks for base64, which its types do not allow."""
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0)


@pytest.fixture(scope="module")
def llm():
    return LLM("demo", **ENGINE)


@pytest.fixture(scope="module")
def wanted(llm):
    return np.array([output.embedding for output in llm.embed(TEXTS)])


@pytest.fixture
def post(http):
    """Sends a request with these fields."""
    return lambda path, **body: http.post(f"/v1/{path}", json=body)


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}])
def test_the_official_client(client, llm, wanted, encoding):
    """Which asks for base64 by itself."""
    reply = client.embeddings.create(model="demo", input=TEXTS, **encoding)
    assert [data.index for data in reply.data] == [0, 1, 2]
    np.testing.assert_allclose([data.embedding for data in reply.data], wanted, atol=1e-5)
    count = sum(len(output.prompt_token_ids) for output in llm.embed(TEXTS))
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == count


def test_base64_is_float32(post, wanted):
    data = post("embeddings", input=TEXTS[0], encoding_format="base64").json()["data"]
    found = np.frombuffer(base64.b64decode(data[0]["embedding"]), "<f4")
    np.testing.assert_allclose(found, wanted[0], atol=1e-5)


def test_token_ids_and_dimensions(client, llm):
    ids = llm.get_tokenizer().encode(TEXTS[0])
    cut = llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8))[0].embedding
    for given in (ids, [ids, ids]):
        reply = client.embeddings.create(model="demo", input=given, dimensions=8)
        for data in reply.data:
            np.testing.assert_allclose(data.embedding, cut, atol=1e-5)


def test_metrics_count_prompts_and_no_generated_token(http, post):
    """A text is an observation of each histogram; none has a token to time or to count."""

    def read() -> dict[str, float]:
        text = http.get("/metrics").text
        lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("vllm:"))
        return {name.partition("{")[0]: float(value) for name, _, value in lines}

    before = read()
    count = post("embeddings", input=TEXTS).json()["usage"]["prompt_tokens"]
    more = {name: value - before.get(name, 0) for name, value in read().items()}
    assert more["vllm:prompt_tokens_total"] == count
    assert more["vllm:request_prompt_tokens_count"] == len(TEXTS)
    assert more["vllm:generation_tokens_total"] == 0
    assert more["vllm:request_generation_tokens_sum"] == 0
    assert more["vllm:request_params_max_tokens_count"] == 0


def test_an_input_may_fill_the_context(post):
    ids = [5] * 128
    assert post("embeddings", input=ids).json()["usage"]["prompt_tokens"] == 128
    assert post("embeddings", input=[*ids, 5]).json()["error"]["param"] == "input"


def test_more_inputs_than_may_wait(post):
    """They are taken in turns, in order."""
    texts = [TEXTS[i % 3] for i in range(40)]
    data = post("embeddings", input=texts).json()["data"]
    assert [item["index"] for item in data] == list(range(40))
    for i in range(3, 40):
        np.testing.assert_allclose(data[i]["embedding"], data[i % 3]["embedding"], atol=1e-5)


def test_long_inputs_are_cut_if_asked(post):
    refused = post("embeddings", input="word " * 400)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    reply = post("embeddings", input="word " * 400, truncate_prompt_tokens=-1)
    assert reply.json()["usage"]["prompt_tokens"] == 128


def test_a_text_far_beyond_the_context_is_cut_to_its_beginning(post):
    text = "word " * 500_000  # more than the server counts
    reply = post("embeddings", input=[text, "A dog"], truncate_prompt_tokens=-1).json()
    same = post("embeddings", input=["word " * 400, "A dog"], truncate_prompt_tokens=-1).json()
    for found, wanted in zip(reply["data"], same["data"], strict=True):
        np.testing.assert_allclose(found["embedding"], wanted["embedding"], atol=1e-5)
    for path, body in ("rerank", {"query": "a", "documents": [text]}), ("score", {"text_1": text}):
        body |= {"truncate_prompt_tokens": 100} | ({"text_2": "b"} if path == "score" else {})
        assert post(path, **body).status_code == 200


def test_one_long_list_of_token_ids_is_one_input(post):
    ids = [5, 6, 7] * 1000
    assert post("embeddings", input=ids).json()["error"]["code"] == "context_length_exceeded"
    reply = post("embeddings", input=ids, truncate_prompt_tokens=128).json()
    assert reply["usage"]["prompt_tokens"] == 128


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_may_be_objects(http, path):
    """/v2/rerank: Cohere's newer client; /rerank: LiteLLM's."""
    documents = [{"text": TEXTS[0]}, TEXTS[1]]
    reply = http.post(path, json={"query": "A dog", "documents": documents}).json()
    assert reply["results"][0]["document"] == {"text": TEXTS[1]}
    assert http.post("/score", json={"text_1": "a", "text_2": "b"}).status_code == 200


@pytest.fixture
def reranker(running):
    """The model answers with the probability of a token, so each pair is a prompt."""
    facts = running.model.facts
    running.model.facts = replace(facts, pooling=PoolingConfig(score_token_ids=(1, 2)))
    yield
    running.model.facts = facts


@pytest.mark.usefixtures("reranker")
def test_the_text_of_all_pairs_is_bounded(post, monkeypatch):
    """A reranker reads the query and the instruction once a document, and a query of its own pair
    once."""
    body = {"query": "q" * 9_000, "documents": ["d"] * 1_000, "instruction": "i" * 9_000}
    error = post("rerank", **body).json()["error"]
    assert "18,010,000 characters, and at most 16,000,000" in error["message"]
    monkeypatch.setattr(module, "MAX_POOLED_CHARACTERS", 1000)
    texts = ["A story"] * 20
    asked = {"text_1": texts, "text_2": texts, "truncate_prompt_tokens": 100}
    assert post("score", **asked).status_code == 200


def test_the_first_input_that_is_too_long_ends_the_work(http, monkeypatch):
    encoded = []
    whole = prompts.encode_prompt
    monkeypatch.setattr(
        prompts, "encode_prompt", lambda m, text, s: encoded.append(text) or whole(m, text, s)
    )
    texts = ["A dog", "word " * 400, *(f"text {i}" for i in range(900))]
    reply = http.post("/v1/embeddings", json={"input": texts})
    assert "input.1" in reply.json()["error"]["message"]
    assert len(encoded) == 2


def test_rerank_and_score(post, llm):
    wanted = [output.score for output in llm.score("A story", TEXTS)]
    scores = post("score", text_1="A story", text_2=TEXTS).json()
    found = [item["score"] for item in scores["data"]]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    body = {"query": "A story", "documents": TEXTS, "top_n": 2}
    results = post("rerank", **body).json()["results"]
    assert [item["index"] for item in results] == sorted(range(3), key=lambda i: -wanted[i])[:2]
    assert results[0]["document"] == {"text": TEXTS[results[0]["index"]]}
    assert results[0]["relevance_score"] == pytest.approx(max(wanted), abs=1e-5)
    assert len(post("rerank", **{**body, "top_n": 0}).json()["results"]) == 3  # as vLLM's


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("embeddings", {"input": []}, "input", "input"),
        ("embeddings", {"input": ["a", 7]}, "input.1", "input.1"),
        ("embeddings", {"input": [99999999]}, "input", "outside the vocabulary"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ("embeddings", {"input": "a", "dimensions": 1 << 20}, "dimensions", "at most"),
        ("embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name", "must be one of"),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
        ("rerank", {"query": "a", "documents": ["word " * 400]}, "documents", "context"),
        ("rerank", {"query": "word " * 90_000, "documents": ["a"]}, "query", "context"),
        ("score", {"text_1": "a", "text_2": ["b", "word " * 400]}, "text_2", "context"),
        ("rerank", {"query": "a", "documents": ["b", {"title": "c"}]}, "documents.1", "a text"),
        ("rerank", {"query": "a", "documents": ["b", ""]}, "documents.1", "empty"),
        ("embeddings", {"input": ["a", "", "b"]}, "input.1", "empty"),
        ("score", {"text_1": 3, "text_2": "b"}, "text_1", "a text, or a list"),
        ("score", {"text_1": {"a": 1}, "text_2": "b"}, "text_1", "a text, or a list"),
        ("rerank", {"query": "", "documents": ["a"]}, "query", "empty"),
        ("rerank", {"query": "a", "documents": []}, "documents", "at least one"),
        ("rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "top_n"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, None, "2 queries"),
        ("score", {"text_1": "a", "text_2": "b", "cache_salt": 3}, "cache_salt", "cache_salt"),
    ],
)
def test_what_is_refused(post, path, body, param, words):
    reply = post(path, **body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert words in error["message"]
    assert error["param"] == param
