"""`/v1/models`, `/tokenize` and `/detokenize`."""

from datetime import UTC, datetime, timedelta

import anthropic
import openai
import pytest

from vllm_metal_lite import __version__
from vllm_metal_lite.server.served_model import ModelSpec

SERVING = {"specs": [ModelSpec("tiny/demo", "demo")]}
HI = [{"role": "user", "content": "hi"}]


def test_the_models_and_one_of_them(client):
    [model] = client.models.list().data
    assert model == client.models.retrieve("tiny/demo")
    assert (model.id, model.object) == ("tiny/demo", "model")
    extra = model.model_extra
    assert extra["max_model_len"] == extra["context_length"] == 4096
    assert extra["root"] == "demo"
    assert extra["thinking"] is False
    assert extra["capabilities"] == ["completion"]
    with pytest.raises(openai.NotFoundError, match="`other` does not exist") as listed:
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as asked:
        client.completions.create(model="other", prompt="x")
    assert listed.value.body == asked.value.body
    answer = client.completions.create(model="tiny/demo", prompt="x", max_tokens=1)
    assert answer.model == "tiny/demo"


def test_the_models_for_anthropics_client(running):
    with anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0) as client:
        page = client.models.list()
        [model] = page.data
        assert (model.id, model.display_name, model.type) == ("tiny/demo", "tiny/demo", "model")
        assert datetime.now(UTC) - model.created_at < timedelta(days=1)
        assert (page.has_more, page.first_id, page.last_id) == (False, "tiny/demo", "tiny/demo")
        assert client.models.retrieve("tiny/demo") == model
        assert list(page) == [model]


def test_the_version_and_what_is_not_there(http):
    assert http.get("/version").json() == {"version": __version__}
    missing = http.get("/v1/nothing").json()
    assert missing["error"]["message"] == "unknown path: /v1/nothing"


ROLES = "the role of a message must be one of system, user, assistant, tool, got "


@pytest.mark.parametrize("role", ["critic", "System", "human"])
def test_roles_that_no_template_knows(http, role):
    said = {"role": role, "content": "x"}
    for path, body in {
        "/v1/chat/completions": {"messages": [said, *HI]},
        "/v1/responses": {"input": [said, *HI]},
        "/v1/messages": {"messages": [said, *HI], "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": [said, *HI]},
        "/tokenize": {"messages": [said, *HI]},
    }.items():
        answer = http.post(path, json=body)
        assert answer.status_code == 400, path
        message = answer.json()["error"]["message"]
        expected = "messages.0.role must be user, assistant or system, got "
        assert message == (expected if path.startswith("/v1/messages") else ROLES) + repr(role)


def test_text_to_tokens_and_back(http):
    reply = http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 4096
    assert http.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "héllo"}
    assert http.post("/tokenize", json={"prompt": "héllo"}).json()["token_strs"] is None
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_a_conversation_has_as_many_tokens_as_its_chat_says(http):
    chat = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1}).json()
    whole = http.post("/tokenize", json={"messages": HI}).json()
    assert whole["count"] == chat["usage"]["prompt_tokens"]
    short = http.post("/tokenize", json={"messages": HI, "add_generation_prompt": False}).json()
    assert whole["tokens"][: short["count"]] == short["tokens"] != whole["tokens"]
