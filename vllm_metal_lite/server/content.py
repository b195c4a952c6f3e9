"""What messages are made of, in the form that chat templates want."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from vllm_metal_lite.errors import show
from vllm_metal_lite.server.errors import bad, must_be
from vllm_metal_lite.server.fields import optional, required_text, required_type, type_of

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
        raise must_be(where, "a string or a list of parts", content)
    return "\n".join(part_text(part, f"{where}.{i}") for i, part in enumerate(content))


def result_text(content: Any, where: str) -> str:
    """The text of a tool's result.  Images and files are named in place of shown, so that an agent
    can continue.  Raises ApiError (400) for what is no part."""
    if isinstance(content, list):
        content = [_named(part) for part in content]
    return text_of(content, where)


def _named(part: Any) -> Any:
    kind = type_of(part)
    if kind in (None, *_TEXT, "refusal"):
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


def function_call(
    fields: Mapping[str, Any], id_name: str, arguments: Any, where: str
) -> dict[str, Any]:
    """An entry of `tool_calls`.  id_name: the field with its id.

    Raises ApiError (400) for a bad id, and without a name.
    """
    name = required_text(fields, "name", where)
    function = {"name": name, "arguments": arguments_of(arguments)}
    return {"id": optional(fields, id_name, str, where), "type": "function", "function": function}


def tool_message(
    fields: Mapping[str, Any], id_name: str, name: str, names: Mapping[Any, str], where: str
) -> dict[str, Any]:
    """The message of a tool: the field `name` has the result, the field `id_name` the call's id.

    names: of tools, by these ids.  Raises ApiError (400).
    """
    call_id = optional(fields, id_name, str, where)
    message = {"role": "tool", "tool_call_id": call_id}
    if call_id in names:
        message["name"] = names[call_id]
    return {**message, "content": result_text(fields.get(name), f"{where}.{name}")}


def part_text(part: Any, where: str) -> str:
    """The text of one part.  Raises ApiError (400)."""
    if isinstance(part, str):
        return part
    kind = required_type(part, where)
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in (*_TEXT, "refusal"):
        raise bad(where, f": this server takes text only, got a part of type {show(kind)}")
    if not isinstance(text, str):
        raise must_be(f"{where}.text", "a string", text)
    return text
