"""Limits before work: a request that cannot be served is refused before it costs time or memory."""

import json
from contextlib import nullcontext
from unittest.mock import Mock

import httpx
import pytest

from tests.support.server.raw_http import CHAT, MESSAGES
from vllm_metal_lite import SamplingParams
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.request_limits import check_json, check_logprobs

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture
def unread(running, monkeypatch):
    """Fails if a template or a tokenizer sees anything."""
    model = running.server.models.loaded["demo"].model

    reads = Mock(side_effect=AssertionError("read before it was refused"))
    monkeypatch.setattr(model.tokenizer._tokenizer, "apply_chat_template", reads)
    monkeypatch.setattr(model.tokenizer._tokenizer, "encode", reads)
    monkeypatch.setattr(model, "encode_text", reads)


@pytest.fixture
def encoded(running, monkeypatch):
    """The texts that the tokenizer gets, and their tokens."""
    tokenizer, found = running.server.models.loaded["demo"].model.tokenizer._tokenizer, []
    encode = tokenizer.encode

    def noted(text: str, **kwargs) -> list[int]:
        token_ids = encode(text, **kwargs)
        found.append((text, token_ids))
        return token_ids

    monkeypatch.setattr(tokenizer, "encode", noted)
    return found


def refused(http: httpx.Client, path: str, body: dict | bytes) -> dict:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "field", "value", "entries"),
    [
        (CHAT, "messages", HI, 2_048),
        (MESSAGES, "messages", HI, 2_048),
        ("/tokenize", "messages", HI, 2_048),
        ("/v1/responses", "input", HI, 2_048),
        (CHAT, "tools", [TOOL], 1_024),
        (CHAT, "stop", ["x"], 128),
        (MESSAGES, "stop_sequences", ["x"], 128),
        (CHAT, "bad_words", ["x"], 512),
        (CHAT, "stop_token_ids", [1], 1_024),
        (CHAT, "allowed_token_ids", [1], 32_768),
        ("/v1/responses", "include", [1], 1_024),
        (CHAT, "unknown", [1], 1_024),
        (CHAT, "logit_bias", {}, 4_096),
    ],
)
def test_lists_have_a_limit(http, unread, path, field, value, entries):
    if isinstance(value, list):
        many = value * (entries + 1)
    else:
        many = dict.fromkeys(map(str, range(entries + 1)), 1)
    error = refused(http, path, {"messages": HI, "max_tokens": 1, field: many})
    assert path == MESSAGES or error["param"] == field
    assert error["message"] == f"{field} may have at most {entries:,} entries, got {entries + 1:,}"


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("stop", ["x" * 8_193], 8_192),
        ("bad_words", ["x" * 16_385], 16_384),
        ("tools", [{"function": {"description": "x" * 1_000_000}}], 1_000_000),
        ("structured_outputs", {"regex": "x" * 200_001}, 200_000),
        ("response_format", {"json_schema": {"schema": {"x" * 200_001: 1}}}, 200_000),
    ],
)
def test_texts_of_a_field_have_a_limit(http, unread, field, value, most):
    error = refused(http, CHAT, {"messages": HI, field: value})
    assert error["message"].startswith(f"{field} may have at most {most:,} characters, got ")


@pytest.mark.parametrize(
    "body", [{"n": 129}, {"logprobs": True, "top_logprobs": 21}, {"prompt_logprobs": 21}]
)
def test_numbers_have_a_limit(http, unread, body):
    name, value = next(reversed(body.items()))
    error = refused(http, CHAT, {"messages": HI, **body})
    assert f"{name} must be an integer from" in error["message"]
    assert str(value) in error["message"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/responses", "/tokenize", "/v1/completions"])
def test_a_text_that_no_tokens_could_hold_is_refused_unread(http, running, unread, path):
    model = running.server.models.loaded["demo"].model
    text = "a" * (model.max_characters + 1)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    if path == "/v1/responses":
        body = {"input": text}
    elif path == "/v1/completions":
        body = {"prompt": text}
    message = refused(http, path, body)["message"]
    if path == MESSAGES:
        assert message.startswith("prompt is too long: ")
    else:
        assert f"no more than {model.max_characters} can fit" in message
        assert f"maximum context length is {model.facts.max_model_len} tokens" in message


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_long_text_is_encoded_no_further_than_needed(http, running, encoded, path):
    model = running.server.models.loaded["demo"].model
    text = "0 1 2 3 " * (model.max_characters // 9)
    body = {"messages": [{"role": "user", "content": text}], "prompt": text}
    error = refused(http, path, body)
    assert error["code"] == "context_length_exceeded"
    assert sum(len(part) for part, _ in encoded) < len(text) / 2
    num_tokens = int(error["message"].split("request has ")[1].split()[0])  # an estimate
    assert num_tokens == pytest.approx(len(model.tokenizer.encode(text)), rel=0.1)


def test_a_text_that_may_fit_is_encoded_once(http, encoded):
    text = "once " * 10_000
    http.post("/tokenize", json={"prompt": text})
    assert [part for part, _ in encoded] == [text]


def test_many_small_messages_are_encoded_no_further_than_needed(http, running, encoded):
    model = running.server.models.loaded["demo"].model
    many = [{"role": "user", "content": f"{i} and more words " * 3} for i in range(2_000)]
    error = refused(http, CHAT, {"messages": many})
    assert error["code"] == "context_length_exceeded"
    count = sum(len(token_ids) for _, token_ids in encoded)
    assert count < 1.2 * model.max_prompt_tokens


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b"[" * 200_000, "objects and lists, and at most 20,000"),
        (b"{}," * 200_000, "objects and lists, and at most 20,000"),
        (b"1," * 1_100_000, "commas between values, and at most 1,000,000"),
    ],
)
def test_values_of_a_body_have_a_limit(http, value, what):
    assert what in refused(http, CHAT, b'{"messages":[' + value + b"1]}")["message"]


@pytest.mark.parametrize("inside", ["[{,", 'a "[{,', 'b\\"[', "\\\\\\"])
def test_brackets_and_commas_within_texts_do_not_count(inside):
    check_json(json.dumps({"text": inside * 400_000}).encode())
    with pytest.raises(ApiError, match="has 20,001 objects"):
        check_json(json.dumps([[]] * 20_000 + [inside * 400_000]).encode())


@pytest.mark.parametrize(
    ("num_prompt_tokens", "asked", "words"),
    [
        (9_523, {"prompt_logprobs": 20}, None),
        (10_000, {"prompt_logprobs": 20}, "=20 for 10,000 prompt tokens .* 210,000 .* 200,000"),
        (100, {"logprobs": 20}, None),  # may fill the context
        (100, {"logprobs": 20, "n": 128, "max_tokens": 186}, None),
        (100, {"logprobs": 20, "n": 128, "max_tokens": 187}, "of n=128 .* 502,656 .* 500,000"),
        (100, {"logprobs": 20, "n": 2}, "199,800 tokens of n=2 answers"),
        (99_900, {"logprobs": 20, "n": 2}, None),
        (100, {"n": 128}, None),
    ],
)
def test_log_probabilities_of_a_request_have_a_limit(num_prompt_tokens, asked, words):
    params = SamplingParams(**{"max_tokens": None, **asked})
    refused = pytest.raises(ApiError, match=words) if words else nullcontext()
    with refused:
        check_logprobs([num_prompt_tokens], 100_000, params)


def test_log_probabilities_of_all_prompts_of_a_request_are_counted(http):
    body = {"prompt": [[5] * 400] * 30, "max_tokens": 1, "prompt_logprobs": 20}
    error = http.post("/v1/completions", json=body).json()["error"]
    assert "12,000 prompt tokens asks for 252,000" in error["message"]
    body = {"prompt": [[5]] * 8, "max_tokens": 4000, "logprobs": 20, "ignore_eos": True}
    error = http.post("/v1/completions", json=body).json()["error"]
    assert "32,000 tokens of 8 answers asks for 672,000" in error["message"]
