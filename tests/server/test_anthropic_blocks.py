"""Anthropic's blocks become messages."""

import pytest

from tests.support.server.kit import user
from vllm_metal_lite.server.anthropic_api import conversation_of
from vllm_metal_lite.server.errors import ApiError


def block(text):
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def use(call_id, name, **arguments):
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id, content):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, "is_error": False}


def messages(*given, system=None):
    return list(conversation_of(list(given), system).messages)


def test_texts_are_joined():
    assert messages(user([block("a"), block("b")]), system=[block("S"), block("T")]) == [
        {"role": "system", "content": "S\nT"},
        user("a\nb"),
    ]
    assert messages(user("a"), system="S") == [{"role": "system", "content": "S"}, user("a")]
    assert messages(user([])) == [user("")]


@pytest.mark.parametrize("count", ["cch=1a2b3;", "cch=9f8e7;"])
def test_billing_headers_are_not_for_the_model(count):
    header = f"x-anthropic-billing-header: cc_version=2.1; {count}"
    system = [{"role": "system", "content": "S\nT"}]
    assert messages(user("a"), system=[block(header), block("S"), block("T")])[:-1] == system
    assert messages(user("a"), system=[block(f"{header}\nS"), block("T")])[:-1] == system
    assert messages(user("a"), system=f"{header}\n\nS\nT")[:-1] == system
    assert messages(user("a"), system=[block(header)]) == [user("a")]
    for said in (f"Never write {header}", f"S\n{header}"):  # not at the beginning: an instruction
        assert messages(user("a"), system=[block(said)])[0]["content"] == said
    assert messages(user(header)) == [user(header)]


def test_a_system_message_stays_where_it_is():
    late = {"role": "system", "content": [block("late")]}
    assert messages(user("a"), late) == [user("a"), {"role": "system", "content": "late"}]


def test_calls_and_results():
    thoughts = {"type": "thinking", "thinking": "hm", "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    calls = use("t1", "Read", path="a"), use("t2", "Bash", cmd="ls")
    said = {"role": "assistant", "content": [thoughts, hidden, block("I look."), *calls]}
    results = user([result("t1", [block("A"), block("B")]), result("t2", "done"), block("go on")])
    read, run = (
        {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call, name, arguments in (("t1", "Read", {"path": "a"}), ("t2", "Bash", {"cmd": "ls"}))
    )
    answer = {"role": "assistant", "content": "I look.", "reasoning_content": "hm"}
    assert messages(user("hi"), said, results) == [
        user("hi"),
        {**answer, "tool_calls": [read, run]},
        {"role": "tool", "tool_call_id": "t1", "name": "Read", "content": "A\nB"},
        {"role": "tool", "tool_call_id": "t2", "name": "Bash", "content": "done"},
        user("go on"),
    ]


def test_results_alone_are_no_message_of_the_user():
    said = {"role": "assistant", "content": [use("t1", "Read")]}
    found = messages(user("a"), said, user([result("t1", None)]))
    assert [message["role"] for message in found] == ["user", "assistant", "tool"]


def test_only_text_of_the_assistant_is_gone_on_with():
    said = {"role": "assistant", "content": [block("Well,")]}
    begun = conversation_of([user("a"), said], None)
    assert begun.template == {"continue_final_message": True}
    assert not begun.add_generation_prompt
    called = {"role": "assistant", "content": [block("Well,"), use("t1", "Read")]}
    assert conversation_of([user("a"), called], None).add_generation_prompt


BAD = [{"type": kind} for kind in ("image", "document", "server_tool_use", "text")]


@pytest.mark.parametrize(
    "content", [5, {"type": "text"}, *([block] for block in (5, {}, result("t1", [{}]), *BAD))]
)
def test_bad_blocks_are_named(content):
    with pytest.raises(ApiError, match=r"^messages\.1\.content") as caught:
        messages(user("x"), user(content))
    assert caught.value.status == 400


@pytest.mark.parametrize("place", ["message", "result"])
def test_documents_and_search_results_of_text_are_read(place):
    plain = {"type": "text", "media_type": "text/plain", "data": "All of it."}
    blocks = [
        {"type": "document", "title": "T", "context": "C", "source": plain},
        {"type": "document", "source": {"type": "content", "content": [block("a"), block("b")]}},
        {"type": "search_result", "title": "S", "source": "https://x", "content": [block("c")]},
    ]
    [said] = messages(user(blocks if place == "message" else [result("t1", blocks)]))
    assert said["content"] == "T\nC\nAll of it.\na\nb\nS\nc"


def test_bad_blocks_of_the_assistant_are_named():
    for content in [{"type": "tool_use"}], [{"type": "thinking", "thinking": 5}], [block(5)]:
        with pytest.raises(ApiError, match=r"^messages\.0\.content\.0"):
            messages({"role": "assistant", "content": content})
