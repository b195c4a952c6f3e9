"""Tools and thoughts over Anthropic messages, with the official client; answers are prepared."""

import anthropic
import pytest

from tests.support.chat_apis import ANSWER, PARTS, Messages
from tests.support.clients import OPTIONS
from tests.support.scripted_answers import hermes_call as call


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": "A tool.", "input_schema": schema}


TOOLS = [tool("Bash", command={"type": "string"}), tool("Wait", seconds={"type": "integer"})]
ASK = {
    "model": "demo",
    "max_tokens": 1000,
    "messages": [{"role": "user", "content": "Go on."}],
    "tools": TOOLS,
}


@pytest.fixture(scope="module")
def client(script):
    with anthropic.Anthropic(base_url=script.running.url, **OPTIONS) as client:
        yield client


def test_the_beta_client(script):
    script.says(ANSWER)
    api = Messages(script.running.url)
    betas = ["interleaved-thinking-2025-05-14", "fine-grained-tool-streaming-2025-05-14"]
    ask, messages = {**api.request(), "betas": betas}, api.client.beta.messages
    assert api.read(messages.create(**ask)).parts == PARTS
    with messages.stream(**ask) as stream:
        assert api.read(stream.get_final_message()).parts == PARTS


def test_the_clients_own_loop_runs_tools_and_gives_results_back(client, script):
    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    script.says("<think>\nI add.\n</think>\n\n" + call("add", a=2, b=3), "It is 5.")
    ask = {**ASK, "tools": [add]}
    final = client.beta.messages.tool_runner(**ask).until_done()
    assert final.content[0].text == "It is 5."
    assert final.stop_reason == "end_turn"


def test_thoughts_between_calls_are_blocks_of_their_own(client, script):
    script.says("<think>\nA\n</think>\n\n" + call("Bash", command="ls") + "<think>\nB\n</think>\nC")
    message = client.messages.create(**ASK)
    assert [b.type for b in message.content] == ["thinking", "tool_use", "thinking", "text"]


def params(script):
    return script.requests[-1].params


def test_a_budget_of_thoughts(client, script):
    script.says("Fine.")
    client.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
    assert params(script).thinking.budget == 1024
    for thinking in {"type": "adaptive"}, {"type": "disabled"}:
        client.messages.create(**ASK, thinking=thinking)
        assert params(script).thinking is None


def test_unknown_fields_of_tools_change_nothing(client, script):
    script.says(call("Bash", command="ls"))
    extra = {
        "cache_control": {"type": "ephemeral"},
        "eager_input_streaming": True,
        "type": "custom",
    }
    asked = {**ASK, "tools": [{**TOOLS[0], **extra}]}
    assert client.messages.create(**asked).stop_reason == "tool_use"
    client.messages.count_tokens(**{k: v for k, v in asked.items() if k != "max_tokens"})
