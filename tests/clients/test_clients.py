"""Libraries that people use, and Open WebUI, as clients of the server.

with_NAME is a program of a library, as its users write it; recorded/NAME.json has its requests,
which are replayed in every run.  A new library is one file: the first run with --long records it.
To record it anew, delete its recording.  open_webui.json is written after the program's source.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.server.chat_apis import Chat, Reply, Responses, gathered, object_of
from tests.support.server.kit import OPTIONS
from tests.support.server.scripted import scripted
from tests.support.server.watched import recorded, watched
from vllm_metal_lite.engine.prompt_ids import as_list
from vllm_metal_lite.server.app import POSTS
from vllm_metal_lite.server.body import IGNORED

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODULES = ROOT / "models" / "clients"  # which git ignores
PROGRAMS = {path.stem.removeprefix("with_"): path for path in sorted(HERE.glob("with_*"))}
RECORDED = {path.stem: json.loads(path.read_text()) for path in HERE.glob("recorded/*.json")}
EXCHANGES = [(name, i) for name in sorted(RECORDED) for i in range(len(RECORDED[name]))]
HI = [{"role": "user", "content": "hi"}]
# Programs may call no server but ours.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HAYSTACK_TELEMETRY_ENABLED": "False"}
QUIET |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "DO_NOT_TRACK": "1"}


@pytest.fixture(scope="module")
def client():
    with (
        scripted() as script,
        openai.OpenAI(base_url=f"{script.running.url}/v1", **OPTIONS) as client,
    ):
        client.script = script
        yield client


def said(text: str) -> tuple[list, str]:
    """The parts of an answer, and its end."""
    if not text.startswith("<tool_call>"):
        return [("text", text)], "stop"
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    return [("call", call["name"], call["arguments"])], "tool_calls"


def ask(client: openai.OpenAI, path: str, body: dict) -> Reply:
    """The reply to a recorded request, which the official client checks against its schema."""
    how = {"model": "demo", "stream": body.get("stream") or False, "extra_body": body}
    if path == "/v1/responses":
        reply = client.responses.create(input="", **how)
        return Responses.read(None, [*reply][-1].response if how["stream"] else reply)
    if path == "/v1/completions":
        reply = client.completions.create(prompt="", **how)
        [choice] = reply.choices
        return Reply([("text", choice.text)], choice.finish_reason, reply.usage.completion_tokens)
    reply = client.chat.completions.create(messages=[], **how)
    if not how["stream"]:
        return Chat.read(reply)
    chunks = list(reply)
    assert (chunks[-1].usage is not None) == bool(
        (body.get("stream_options") or {}).get("include_usage")
    )
    [found] = gathered(chunks)
    parts = [("text", found["content"])] if found["content"] else []
    parts += [("call", name, object_of(arguments)) for name, arguments in found["calls"]]
    return Reply(parts, found["end"], 0)


@pytest.mark.parametrize(("name", "number"), EXCHANGES)
def test_a_recorded_request_gets_what_the_model_says(client, name, number):
    exchange, script = RECORDED[name][number], client.script
    path, body = exchange["path"], exchange["body"]
    if path.endswith(("/embeddings", "/rerank")):
        reply = httpx.post(script.running.url + path, json=body).json()
        found, texts = reply.get("data") or reply["results"], body.get("input") or body["documents"]
        assert sorted(one["index"] for one in found) == list(range(len(as_list(texts))))
        return
    script.says(exchange["says"])
    reply = ask(client, path, body)
    assert (reply.parts, reply.end) == said(exchange["says"])
    params = script.requests[-1].params
    form = body.get("response_format") or (body.get("text") or {}).get("format")
    if form or body.get("tool_choice") not in (None, "auto", "none"):
        assert params.structured_outputs is not None
    limits = map(body.get, ("max_completion_tokens", "max_output_tokens", "max_tokens"))
    assert params.max_tokens == next(filter(None, limits), None)


def test_what_clients_send_is_read_or_known_to_have_no_effect():
    """A new field of a client is read, or joins IGNORED, or is listed here with its reason."""
    types = {path: body_type for path, body_type, _ in POSTS}
    unknown = {
        (exchange["path"], field)
        for exchanges in RECORDED.values()
        for exchange in exchanges
        for field in types[exchange["path"]].model_validate(exchange["body"]).unknown_fields()
    }
    # Open WebUI sends the name of its setting RAG_EMBEDDING_PREFIX_FIELD_NAME if there is one.
    assert unknown == {("/v1/embeddings", "prefix")}


def test_the_documents_list_the_fields_without_effect():
    text = (ROOT / "docs" / "server.md").read_text()
    [listed] = re.findall(r"\*\*Ignored\*\*: (.*?)\.\n", text, re.DOTALL)
    assert set(re.findall("`(.*?)`", listed)) == IGNORED
    for path, body_type, _ in POSTS:
        assert not IGNORED & body_type.model_fields.keys(), path


def test_the_documents_have_a_row_for_each_program():
    rows = re.findall(
        r"^\| .*clients/(with_\w+\.\w+)", (ROOT / "docs" / "clients.md").read_text(), re.M
    )
    assert sorted(rows) == sorted(path.name for path in PROGRAMS.values())


def test_fields_without_effect_may_have_any_value(client):
    """`metadata` and two others come back in a response, as they are."""
    url = client.script.running.url
    odd = {**dict.fromkeys(IGNORED, 1), "metadata": {"a": 1}, "previous_response_id": ""}
    odd |= {"prompt_cache_key": "x", "max_tokens": 5}
    client.script.says("ok")
    for path, fields in {
        "/v1/chat/completions": {"messages": HI},
        "/v1/completions": {"prompt": "hi"},
        "/v1/messages": {"messages": HI},
        "/v1/responses": {"input": HI},
    }.items():
        reply = httpx.post(url + path, json={**odd, **fields})
        assert reply.status_code == 200, reply.text
        assert reply.json().get("metadata", {"a": 1}) == {"a": 1}


def test_older_names_of_forms_are_not_ignored(client):
    for name in "guided_json", "guided_regex", "guided_choice", "guided_grammar":
        for path, fields in (
            ("chat/completions", {"messages": HI}),
            ("completions", {"prompt": "a"}),
        ):
            reply = httpx.post(f"{client.base_url}{path}", json={**fields, name: "a"})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


def test_an_effort_beside_the_conversation(client):
    """Open WebUI sends such requests to the Responses API."""
    for fields in {"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}:
        reply = httpx.post(f"{client.base_url}responses", json={"input": HI, **fields})
        assert reply.json()["reasoning"]["effort"] == "none"


def command_of(program: Path) -> list[str]:
    """The command that runs a program.  Skips the test where its library cannot be installed."""
    tool = "uv" if program.suffix == ".py" else "npm"
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} here")
    if tool == "uv":
        return ["uv", "run", "--quiet", "--no-project", "--script", str(program)]
    packages = program.read_text().splitlines()[0].removeprefix("// dependencies: ").split()
    MODULES.mkdir(parents=True, exist_ok=True)
    flags = ["--no-audit", "--no-fund", "--ignore-scripts", "--prefix", MODULES]
    run = subprocess.run(["npm", "install", *flags, *packages], capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"its packages cannot be installed: {run.stderr[-300:]}")
    return ["node", shutil.copy(program, MODULES)]


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gets_what_it_wants(name, tmp_path):
    """Its requests are recorded if there is no recording yet."""
    command, kept = command_of(PROGRAMS[name]), HERE / "recorded" / f"{name}.json"
    env = {**os.environ, **QUIET, "HOME": str(tmp_path), "OPENAI_API_KEY": "-"}
    env["UV_CACHE_DIR"] = str(MODULES / "uv")
    with watched() as seen:
        url = seen.script.running.url
        run = subprocess.run([*command, url], capture_output=True, text=True, timeout=300, env=env)
    if run.stderr.startswith("error: "):  # uv's own
        pytest.skip(f"its packages cannot be installed: {run.stderr[-300:]}")
    assert run.returncode == 0, run.stderr[-3000:]
    if not kept.exists():
        kept.write_text(recorded(seen.exchanges))
