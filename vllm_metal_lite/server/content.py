"""What messages are made of, in the form that chat templates want."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from vllm_metal_lite.errors import show
from vllm_metal_lite.server.errors import ApiError

# By type; those of OpenAI's chat, of Responses, and of Anthropic.
_TEXT = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


def text_of(content: Any, where: str) -> str:
    """The text of `content`; None is no text.  where: names the field in errors.

    Parts are joined by newlines, as vLLM does for templates that want a string.
    Raises ApiError (400) for images, audio, files and unknown parts.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Iterable) or isinstance(content, Mapping):
        raise _bad(f"{where} must be a string or a list of parts, got {show(content)}", where)
    return "\n".join(part_text(part, f"{where}.{i}") for i, part in enumerate(content))


def result_text(content: Any, where: str) -> str:
    """The text of a tool's result.  Images and files are named in place of shown, so that an agent
    can go on.  Raises ApiError (400) for what is no part."""
    if isinstance(content, list):
        content = [_named(part) for part in content]
    return text_of(content, where)


def _named(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind in (*_TEXT, "refusal"):
        return part
    return f"[{kind}: left out, since the model takes text only]"


def arguments_of(arguments: Any) -> Any:
    """The arguments of a call as an object, which templates print as they like.

    A model wrote them; if they are not JSON, the template shows them as they are.
    """
    if isinstance(arguments, str) and arguments:
        with suppress(ValueError, RecursionError):
            return json.loads(arguments)
    return arguments or {}


def function_call(call_id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """An entry of `tool_calls`.  Raises ApiError (400) for a bad id, and without a name."""
    if not isinstance(name, str) or not name:
        raise _bad(f"{where}.name must be a non-empty string, got {show(name)}", f"{where}.name")
    check_id(call_id, f"{where}.id")
    function = {"name": name, "arguments": arguments_of(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def check_id(call_id: Any, where: str) -> None:
    """Raise ApiError (400) unless an id of a call is a string, or not given."""
    if not isinstance(call_id, str | None):
        raise _bad(f"{where} must be a string, got {show(call_id)}", where)


def part_text(part: Any, where: str) -> str:
    """The text of one part.  Raises ApiError (400)."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise _bad(f"{where} must be an object with a type, got {show(part)}", where)
    kind = part["type"]
    if kind == "refusal":
        kind, text = "text", part.get("refusal")
    else:
        text = part.get("text")
    if kind not in _TEXT:
        raise _bad(f"{where}: this server takes text only, got a part of type {show(kind)}", where)
    if not isinstance(text, str):
        raise _bad(f"{where}.text must be a string, got {show(text)}", where)
    return text


def _bad(message: str, where: str) -> ApiError:
    return ApiError(400, message, param=where)
