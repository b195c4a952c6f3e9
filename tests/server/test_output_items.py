"""Tools and thoughts over `/v1/responses`, with the official client; answers are prepared."""

import json
from itertools import groupby

import pytest

from tests.support.server.scripted import hermes_call as call
from vllm_metal_lite import SamplingParams
from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.chat_formats.parser import ChatParser
from vllm_metal_lite.chat_formats.tool import Tool
from vllm_metal_lite.server.openai_api.response_events import ResponseReply
from vllm_metal_lite.server.openai_api.response_tools import Callee
from vllm_metal_lite.server.worker.messages import Add
from vllm_metal_lite.server.worker.request_state import RequestState

CMD = {"type": "object", "properties": {"cmd": {"type": "string"}}}
RUN = {"type": "function", "name": "run", "strict": False, "parameters": CMD}
WAIT = {"type": "function", "name": "wait", "parameters": {}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [WAIT]}
TOOLS = [RUN, PATCH, AGENTS, {"type": "web_search"}]
ASK = {"model": "demo", "input": "Go on.", "tools": TOOLS}


@pytest.fixture(scope="module")
def running(script):
    return script.running


ANSWER = (
    "<think>\nI look.\n</think>\n\nLet me see.\n"
    + call("run", cmd="cat a.txt")
    + call("agents__wait")
    + call("apply_patch", input="*** Begin\n*** End")
)


def check(response):
    thoughts, said, run, wait, patch = response.output
    assert [part.text for part in thoughts.content] == ["I look."]
    assert thoughts.summary == []
    assert response.output_text == said.content[0].text == "Let me see."
    assert (run.type, run.name, run.namespace) == ("function_call", "run", None)
    assert json.loads(run.arguments) == {"cmd": "cat a.txt"}
    assert (wait.name, wait.namespace, wait.arguments) == ("wait", "agents", "{}")
    assert (patch.type, patch.name) == ("custom_tool_call", "apply_patch")
    assert patch.input == "*** Begin\n*** End"
    assert response.status == "completed"
    assert len({item.id for item in response.output}) == 5


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_streamed_and_whole_answers_are_the_same(client, script, size):
    script.says(ANSWER, size=size)
    whole = client.responses.create(**ASK)
    check(whole)
    with client.responses.stream(**ASK) as stream:
        events = list(stream)
        final = stream.get_final_response()
    check(final)
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.done") == 5
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == "*** Begin\n*** End"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.usage.output_tokens == whole.usage.output_tokens == len(script.pieces())


def part(kind, text):
    """The events of an item that holds its text in a part."""
    news = ["output_item.added", f"{kind}.added", f"{text}.delta", f"{text}.done", f"{kind}.done"]
    return [*news, "output_item.done"]


def item(text):
    return ["output_item.added", f"{text}.delta", f"{text}.done", "output_item.done"]


MESSAGE = part("content_part", "output_text")
SUMMARY = part("reasoning_summary_part", "reasoning_summary_text")
THOUGHTS = "<think>\nI look.\n</think>\n\nFine."


@pytest.mark.parametrize(
    ("answer", "summary", "expected", "prefixes"),
    [
        ("", None, [], []),
        ("Fine.", None, MESSAGE, ["msg"]),
        (THOUGHTS, None, [*part("content_part", "reasoning_text"), *MESSAGE], ["rs", "msg"]),
        (THOUGHTS, "auto", [*SUMMARY, *MESSAGE], ["rs", "msg"]),
        (call("run", cmd="ls"), None, item("function_call_arguments"), ["fc"]),
        (call("apply_patch", input="***"), None, item("custom_tool_call_input"), ["ctc"]),
    ],
)
def test_the_events_of_each_item(client, script, answer, summary, expected, prefixes):
    script.says(answer, size=2)
    created, begun, *events, completed = client.responses.create(
        **ASK, reasoning={"summary": summary}, stream=True
    )
    ends = [event.type.removeprefix("response.") for event in (created, begun, completed)]
    assert ends == ["created", "in_progress", "completed"]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for kind, _ in groupby(kinds)] == expected
    added, done = (
        [event.item for event in events if event.type == f"response.output_item.{kind}"]
        for kind in ("added", "done")
    )
    assert done == completed.response.output
    assert {i.status for i in added} <= {"in_progress"}
    assert [i.id for i in added] == [i.id for i in done]
    ids = [event.item_id for event in events if event.type.endswith(".delta")]
    assert [item_id for item_id, _ in groupby(ids)] == [i.id for i in done]
    assert [i.id.split("_")[0] for i in done] == prefixes
    indexes = [e.output_index for e in events if e.type == "response.output_item.added"]
    assert indexes == list(range(len(done)))


def test_calls_have_different_ids_though_those_of_the_model_repeat():
    request = RequestState(Add("resp_1", [1], SamplingParams()), None)
    reply = ResponseReply(request, None, {"wait": Callee("function", "wait")}, False, {}, None)
    call = "<|tool_call_begin|>functions.wait:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    answer = f"<|tool_calls_section_begin|>{2 * call}<|tool_calls_section_end|>"
    reply.take(ChatParser(FORMATS["kimi_k2"], [Tool("wait")]).feed(answer))
    assert len({item["call_id"] for item in reply.items}) == len(reply.items) == 2


def test_thoughts_as_a_summary(client, script):
    script.says("<think>\nI look.\n</think>\n\nFine.")
    options = {"summary": "auto", "effort": "low"}
    encrypted = ["reasoning.encrypted_content"]
    response = client.responses.create(**ASK, reasoning=options, include=encrypted)
    thoughts, said = response.output
    assert thoughts.encrypted_content is None
    assert [part.text for part in thoughts.summary] == ["I look."]
    assert not thoughts.content
    assert (response.reasoning.summary, response.reasoning.effort) == ("auto", "low")
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < 15
    assert said.content[0].text == "Fine."


def test_the_request_is_repeated(client, script):
    script.says("Fine.")
    response = client.responses.create(**ASK, parallel_tool_calls=False)
    assert [tool.type for tool in response.tools] == ["function", "custom", "namespace"]
    assert response.parallel_tool_calls is False
    assert response.tool_choice == "auto"


@pytest.mark.parametrize("end", ["length", "stop"])
def test_half_an_input_is_never_done(client, script, end):
    script.says('<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** B', end=end)
    events = list(client.responses.create(**ASK, stream=True))
    kinds = [event.type for event in events]
    assert "response.custom_tool_call_input.delta" in kinds
    assert "response.output_item.done" not in kinds
    assert kinds[-1] == "response.incomplete"
    assert events[-1].response.output[0].input == "*** B"


def test_the_turns_of_an_agent(client, script):
    """What a client gets goes back into the next request."""
    history = [{"role": "user", "content": "Fix a.txt"}]
    answers = [
        "<think>\nI look.\n</think>\n\n" + call("run", cmd="cat a.txt"),
        call("apply_patch", input="*** Begin\n*** End"),
        "Done.",
    ]
    script.says(*answers)
    for _ in answers:
        response = client.responses.create(**{**ASK, "input": history})
        for item in response.output:
            history.append(item.to_dict())
            if item.type in ("function_call", "custom_tool_call"):
                kind = f"{item.type}_output"
                history.append({"type": kind, "call_id": item.call_id, "output": "ok"})
    assert response.output_text == "Done."
    expected = ["user", "reasoning", "function_call", "function_call_output", "custom_tool_call"]
    expected += ["custom_tool_call_output", "message"]
    assert [item.get("type", "user") for item in history] == expected
