"""A model that leaves memory and comes back: its endpoints, its streams, its prefixes."""

import json
import shutil

import anthropic
import httpx
import openai
import pytest

from tests.support.server.command import eventually, is_alive, serve_command
from tests.support.server.kit import OPTIONS, user
from vllm_metal_lite.server.served_model import ModelSpec
from vllm_metal_lite.server.settings import ServerConfig

HI = [user("hi")]
# Each stream whose model is loaded begins at once, with comments.
EAGER = ServerConfig(port=0, keep_alive=0.001, api_key="x")
SPECS = [
    ModelSpec("demo", "demo"),
    ModelSpec("none", "/no/such"),
    ModelSpec("pinned", "demo", True),
]
SERVING = {"specs": SPECS, "config": EAGER}

STAGES = [
    "starting a process",
    "finding the model's files",
    "waiting for memory",
    "reading the model's files",
    "reading the weights",
    "comparing the model with mlx-lm's",
    "building the engine",
]


@pytest.fixture(scope="module")
def http(running):
    with httpx.Client(base_url=running.url, timeout=600, headers={"x-api-key": "x"}) as http:
        yield http


def post(http: httpx.Client, what: str, **body) -> httpx.Response:
    return http.post(f"/v1/models/{what}", json=body)


def pids(http: httpx.Client) -> list[int | None]:
    return [model.get("pid") for model in http.get("/status").json()["models"]]


def test_load_and_unload(http):
    pid, *_ = pids(http)
    unloaded = post(http, "unload", model="demo").json()
    assert (unloaded["id"], unloaded["state"], unloaded["error"]) == ("demo", "unloaded", None)
    assert not is_alive(pid)
    # What the page shows of a model stays.
    assert (unloaded["max_model_len"], unloaded["input_modalities"]) == (4096, ["text"])
    assert post(http, "unload", model="demo").json() == unloaded
    listed = http.get("/v1/models").json()["data"]
    assert [model["state"] for model in listed] == ["unloaded", "unloaded", "loaded"]
    loaded = post(http, "load", model="demo").json()
    status = http.get("/status").json()["models"][0]
    assert [*status["start_seconds"]][:4] == STAGES[:4]
    assert {*status["start_seconds"]} <= {*STAGES}
    assert all(seconds >= 0 for seconds in status["start_seconds"].values())
    assert status["first_token_seconds"] is None
    body = {"model": "demo", "prompt": "hi", "max_tokens": 2}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert http.get("/status").json()["models"][0]["first_token_seconds"] > 0
    assert loaded == http.get("/v1/models/demo").json()
    assert loaded["state"] == "loaded"
    assert is_alive(pids(http)[0])


@pytest.mark.parametrize(
    ("what", "body", "status", "words"),
    [
        ("load", {"model": "c"}, 404, "`c` does not exist"),
        ("unload", {"model": "c"}, 404, "`c` does not exist"),
        ("unload", {"model": "pinned"}, 409, "`pinned` is pinned: it stays loaded"),
        ("load", {"model": "none"}, 503, "no such folder"),
        (
            "load",
            {"keep_alive": "soon"},
            400,
            'keep_alive: must be seconds, or a duration such as "5m"',
        ),
        ("load", {"keep_alive": True}, 400, "got True"),
        ("load", {"keep_alive": [1]}, 400, "keep_alive: must be seconds"),
        ("load", {"keep_alive": "5m-3s"}, 400, "got '5m-3s'"),
        ("unload", {"model": 5}, 400, "model"),
    ],
)
def test_refusals(http, what, body, status, words):
    refused = post(http, what, **body)
    assert (refused.status_code, words in refused.json()["error"]["message"]) == (status, True)


@pytest.mark.parametrize("what", ["load", "unload"])
def test_the_key_counts(running, what):
    assert httpx.post(f"{running.url}/v1/models/{what}", json={}).status_code == 401


def test_keep_alive_of_requests(http):
    """With keep_alive 0 the model leaves after the request."""
    for value, state in [("1h30m", "loaded"), (-1, "loaded"), ("0", "unloaded")]:
        body = {"model": "demo", "prompt": "hi", "max_tokens": 2, "keep_alive": value}
        assert http.post("/v1/completions", json=body).status_code == 200
        eventually(lambda: http.get("/v1/models/demo").json()["state"] == state)  # noqa: B023


def test_a_stream_reports_the_progress_of_its_model_and_then_its_answer(http):
    body = {"model": "demo", "messages": HI, "max_tokens": 8, "temperature": 0}
    whole = http.post("/v1/chat/completions", json=body).json()
    post(http, "unload", model="demo")
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
        assert stream.status_code == 200
        lines = [line for line in stream.iter_lines() if line]
    assert lines[0].startswith(": the model demo is loading: ")
    *events, last = [line for line in lines if not line.startswith(":")]
    assert last == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in events]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"] != ""


def test_official_clients_wait_for_a_model_and_get_its_error(running, http):
    for name in "demo", "none":
        ask = {"model": name, "stream": True}
        with (
            openai.OpenAI(base_url=f"{running.url}/v1", **OPTIONS) as client,
            anthropic.Anthropic(base_url=running.url, **OPTIONS) as other,
        ):
            for stream in (
                lambda: client.chat.completions.create(messages=HI, max_tokens=4, **ask),  # noqa: B023
                lambda: client.responses.create(input="hi", max_output_tokens=16, **ask),  # noqa: B023
                lambda: other.messages.create(messages=HI, max_tokens=4, **ask),  # noqa: B023
            ):
                post(http, "unload", model="demo")
                if name == "demo":
                    assert len(list(stream())) > 1
                else:
                    with pytest.raises((openai.APIError, anthropic.APIError), match="no such"):
                        list(stream())


def test_who_leaves_while_a_model_loads_holds_nothing(running, http):
    post(http, "unload", model="demo")
    body = {"model": "demo", "messages": HI, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert next(stream.iter_lines()).startswith(":")
    model = running.server.models.by_name["demo"]
    eventually(lambda: not model.num_unfinished and not (model.engine and model.engine.users))
    assert post(http, "unload", model="demo").json()["state"] in ("unloaded", "loading")
    assert post(http, "load", model="demo").json()["state"] == "loaded"


@pytest.mark.long
def test_an_idle_model_gives_its_memory_back_and_finds_its_prefixes_when_it_returns(tmp_path):
    if shutil.disk_usage(tmp_path).free < 5 << 30:
        pytest.skip("prefixes are not written to a disk that is nearly full")
    flags, env = ("--prefix-disk-gib", "1"), {"XDG_CACHE_HOME": str(tmp_path)}
    body = {"prompt": "The sun is hot. " * 200, "max_tokens": 4, "temperature": 0}
    with (
        serve_command(tmp_path / "err", "demo", *flags, "--idle-unload", "0.005", env=env) as it,
        httpx.Client(base_url=it.url(), timeout=600) as client,
    ):

        def ask(**fields):
            return client.post("/v1/completions", json={**body, **fields}).json()

        def leaves():
            eventually(lambda: client.get("/v1/models").json()["data"][0]["state"] == "unloaded")

        first = ask(keep_alive="1h")
        (pid,) = pids(client)
        ask(keep_alive=0)  # a prefix that comes twice is kept
        leaves()
        assert not is_alive(pid)
        last = ask()
        leaves()
    assert first["choices"] == last["choices"]
    details = last["usage"]["prompt_tokens_details"]
    assert details["restored_tokens"] == details["cached_tokens"]
    assert details["restored_tokens"] >= 0.9 * last["usage"]["prompt_tokens"]
