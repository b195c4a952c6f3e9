"""Earlier messages in the shape that the templates of a format take."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Adapt = Callable[[Messages], list[dict[str, Any]]]
# Makes the id of a call in a prompt from (name, number in the conversation, the client's id).
CallId = Callable[[str, int, str], str]


def with_call_ids(call_id: CallId, messages: Messages) -> list[dict[str, Any]]:
    """Give calls and their results ids in the format's form.

    If a client used an id several times, a result belongs to the last call before it.
    """
    found: dict[Any, str] = {}
    number, renamed = 0, []
    for message in messages:
        copy = dict(message)
        if calls := message.get("tool_calls"):
            copy["tool_calls"] = []
            for call in calls:
                old = call.get("id")
                found[old] = call_id(call["function"]["name"], number, str(old or number))
                copy["tool_calls"].append({**call, "id": found[old]})
                number += 1
        if (old := message.get("tool_call_id")) in found:
            copy["tool_call_id"] = found[old]
        renamed.append(copy)
    return renamed


def one_call_each(messages: Messages) -> list[dict[str, Any]]:
    """Split messages so that each has one call, which its results follow."""
    adapted: list[dict[str, Any]] = []
    waiting = [dict(message) for message in messages]
    while waiting:
        message = waiting.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            adapted.append(message)
            continue
        results = []
        while waiting and waiting[0].get("role") == "tool":
            results.append(waiting.pop(0))
        for call in calls:
            adapted.append({**message, "tool_calls": [call]})
            own = [r for r in results if r.get("tool_call_id") == call.get("id")]
            adapted += own
            results = [result for result in results if result not in own]
            message = {"role": message["role"], "content": ""}
        adapted += results
    return adapted


def text_as_thoughts(messages: Messages) -> list[dict[str, Any]]:
    """Move the text before a call into the thoughts, if a message has both."""
    adapted = []
    for message in map(dict, messages):
        thoughts, text = message.get("reasoning_content"), message.get("content")
        if thoughts and text and message.get("tool_calls"):
            message |= {"reasoning_content": f"{thoughts}\n\n{text}", "content": ""}
        adapted.append(message)
    return adapted
