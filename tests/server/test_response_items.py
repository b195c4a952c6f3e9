"""Input items of the Responses API become messages."""

import pytest

from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.openai_api.responses import input_messages

CALL = {"type": "function_call", "call_id": "c1", "name": "run", "arguments": '{"cmd": "ls"}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": {"cmd": "ls"}}}


CALLS = "local_shell", "shell", "apply_patch", "computer", "file_search", "image_generation"
HOSTED = [f"{name}_call{end}" for name in (*CALLS, "code_interpreter") for end in ("", "_output")]
HOSTED += [f"mcp_{end}" for end in ("call", "list_tools", "approval_request", "approval_response")]
HOSTED += ["tool_search_output"]


def item(role, text):
    return {"type": "message", "role": role, "content": text}


def message(role, text, **fields):
    return {"role": role, "content": text, **fields}


def thought(text):
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def text(text):
    return {"type": "input_text", "text": text}


def output(call_id, value, kind="function_call_output"):
    return {"type": kind, "call_id": call_id, "output": value}


def test_a_string_is_a_question():
    question = message("user", "hi")
    assert input_messages("hi", None) == [question]
    assert input_messages("hi", "Be brief.") == [message("system", "Be brief."), question]


def test_developers_at_the_front_join_the_instructions_and_others_stay():
    items = [item("developer", "B"), item("user", "hi"), item("developer", "C")]
    assert input_messages(items, "A") == [
        message("system", "A\n\nB"),
        message("user", "hi"),
        message("system", "C"),
    ]


def test_a_turn_of_the_assistant_is_one_message():
    items = [message("user", "hi", type=None), thought("hm"), item("assistant", "I look."), CALL]
    items += [{"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "***"}]
    items += [output("c1", "a.txt"), output("c2", [text("done")], "custom_tool_call_output")]
    items += [item("assistant", "Fine.")]
    patch = {"name": "patch", "arguments": {"input": "***"}}
    calls = [CALLED, {"id": "c2", "type": "function", "function": patch}]
    assert input_messages(items, None) == [
        message("user", "hi"),
        message("assistant", "I look.", reasoning_content="hm", tool_calls=calls),
        message("tool", "a.txt", tool_call_id="c1", name="run"),
        message("tool", "done", tool_call_id="c2", name="patch"),
        message("assistant", "Fine."),
    ]


def test_calls_of_tools_in_a_namespace_have_flat_names():
    said, tool = input_messages([{**CALL, "namespace": "agents"}, output("c1", "ok")], None)
    assert said["tool_calls"][0]["function"]["name"] == tool["name"] == "agents__run"
    [plain] = input_messages([{**CALL, "namespace": "functions"}], None)
    assert plain["tool_calls"] == [CALLED]


def test_text_behind_calls_stays_before_their_outputs():
    outputs = [output("c1", text) for text in "ab"]
    assert input_messages([thought("hm"), CALL, item("assistant", "Done?"), *outputs], None) == [
        message("assistant", "Done?", reasoning_content="hm", tool_calls=[CALLED]),
        message("tool", "a", tool_call_id="c1", name="run"),
        message("tool", "b", tool_call_id="c1", name="run"),
    ]


def test_tools_and_what_the_host_has_run_are_no_messages():
    items = [
        {"type": "additional_tools", "role": "developer", "tools": []},
        item("user", "hi"),
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        *({"type": kind, "id": "x"} for kind in HOSTED),
    ]
    assert input_messages(items, None) == [message("user", "hi")]


def test_thoughts_in_a_row_are_joined():
    items = [thought("one"), thought("two"), CALL]
    assert input_messages(items, None)[0]["reasoning_content"] == "one\ntwo"


def test_new_thoughts_begin_a_new_message():
    items = [thought("one"), CALL, thought("two"), CALL]
    assert input_messages(items, None) == [
        message("assistant", "", reasoning_content="one", tool_calls=[CALLED]),
        message("assistant", "", reasoning_content="two", tool_calls=[CALLED]),
    ]


def test_thoughts_that_cannot_be_read_or_that_nothing_follows_are_left_out():
    encrypted = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    items = [encrypted, item("assistant", "yes"), thought("hm"), item("user", "go on")]
    assert input_messages(items, None) == [message("assistant", "yes"), message("user", "go on")]


BAD = [{"type": kind} for kind in (None, ["message"], "hologram", "function_call")]
BAD += [{"content": "x"}, {"role": 5, "content": "x"}, {"role": "user", "content": 5}]
BAD += [{"type": "reasoning", "summary": 7}, {"type": "function_call_output", "output": {}}]


@pytest.mark.parametrize("bad", BAD)
def test_bad_items_are_named(bad):
    with pytest.raises(ApiError, match=r"^input\.1") as caught:
        input_messages([item("user", "x"), bad], None)
    assert caught.value.status == 400
