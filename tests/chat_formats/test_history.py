"""Earlier messages as the templates of a format take them."""

from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.chat_formats.history import one_call_each, text_as_thoughts

MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": {}}},
        {"id": None, "type": "function", "function": {"name": "now", "arguments": {}}},
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a"},
    {"role": "tool", "tool_call_id": "other", "content": "b"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "Abcdefgh1", "type": "function", "function": {"name": "read", "arguments": {}}},
    ]},
    {"role": "tool", "tool_call_id": "Abcdefgh1", "content": "c"},
]  # fmt: skip


def ids(name):
    messages = FORMATS[name].adapt(MESSAGES)
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    return calls, [message["tool_call_id"] for message in messages if message["role"] == "tool"]


def test_kimis_hold_the_name_and_count_through_the_conversation():
    calls, results = ids("kimi_k2")
    assert calls == ["functions.read:0", "functions.now:1", "functions.read:2"]
    assert results == ["functions.read:0", "other", "functions.read:2"]


def test_mistrals_have_nine_letters_and_digits():
    calls, results = ids("mistral_list")
    assert all(len(call) == 9 and call.isalnum() for call in calls)
    assert calls[2] == results[2] == "Abcdefgh1"
    assert results[0] == calls[0]
    assert ids("mistral") == (calls, results)


def test_messages_are_not_changed_in_place():
    ids("kimi_k2")
    assert MESSAGES[1]["tool_calls"][0]["id"] == "call_1"


def test_one_call_each():
    first, second = MESSAGES[1]["tool_calls"]
    second = {**second, "id": "call_2"}
    results = [{"role": "tool", "tool_call_id": i, "content": i} for i in ("call_2", "call_1", "x")]
    said = {"role": "assistant", "content": "Hm.", "reasoning_content": "I look."}
    said |= {"tool_calls": [first, second]}
    user = {"role": "user", "content": "go on"}
    assert one_call_each([said, *results, user]) == [
        {**said, "tool_calls": [first]},
        results[1],
        {"role": "assistant", "content": "", "tool_calls": [second]},
        results[0],
        results[2],
        user,
    ]
    assert one_call_each(MESSAGES[3:]) == MESSAGES[3:]


def test_text_before_a_call_joins_the_thoughts():
    call = MESSAGES[4]["tool_calls"]
    both = {"role": "assistant", "content": "Text.", "reasoning_content": "Hm."}
    assert text_as_thoughts([both]) == [both]
    thoughts = {"role": "assistant", "content": "", "reasoning_content": "Hm.\n\nText."}
    assert text_as_thoughts([{**both, "tool_calls": call}]) == [thoughts | {"tool_calls": call}]
