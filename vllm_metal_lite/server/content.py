"""The parts of messages, converted for chat templates."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from vllm_metal_lite.engine.chat_checkpoints import Message
from vllm_metal_lite.errors import show
from vllm_metal_lite.server.errors import bad, must_be
from vllm_metal_lite.server.fields import optional, required_text, required_type, type_of
from vllm_metal_lite.server.pictures import KINDS, OF_SYSTEM, TEXT_ONLY, Pictures
from vllm_metal_lite.server.templates import Content

# The types of parts that hold text, in all three chat APIs.
_TEXT = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


def text_of(content: Any, where: str) -> str:
    """The text of `content`; None is no text.  where: the name of the field in errors.

    Parts are joined by newlines, as vLLM does for templates that want a string.
    Raises ApiError (400) for images, audio, files and unknown parts.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise must_be(where, "a string or a list of parts", content)
    return "\n".join(part_text(part, f"{where}.{i}") for i, part in enumerate(content))


def parts_allowed(
    role: Any, before: Sequence[Message], pictures: Pictures
) -> tuple[Pictures, bool]:
    """(The pictures that a message of this role may have, whether it is a tool's result or brings
    one, see `part_of`.)  before: the messages before it; agents send a result's files in a message
    of the user behind the result."""
    follows_tool = bool(before) and before[-1]["role"] == "tool"
    is_result = role == "tool" or (role == "user" and follows_tool)
    return OF_SYSTEM if role == "system" else pictures, is_result


def content_of(content: Any, where: str, pictures: Pictures, is_result: bool) -> Content:
    """The content of a message that may have pictures: a text, or parts if it has some.  The place
    of the message decides about pictures and is_result, see `parts_allowed`."""
    if not isinstance(content, list):
        return text_of(content, where)
    return joined(
        [part_of(part, f"{where}.{i}", pictures, is_result) for i, part in enumerate(content)]
    )


def part_of(part: Any, where: str, pictures: Pictures, is_result: bool) -> str | dict[str, Any]:
    """The text of a part, or the part for a picture.  In results a note replaces anything that the
    model does not take, so that an agent can continue.  Raises ApiError (400)."""
    kind, sees = type_of(part), pictures.refusal is None
    if sees and kind in KINDS:
        return pictures.take(part, where)
    if kind in (None, *_TEXT, "refusal") or _blocks_of(part) is not None:
        return part_text(part, where)
    takes = "text and pictures only" if sees else "text only"
    source = part.get("source")
    media = source.get("media_type") if kind == "document" and isinstance(source, Mapping) else None
    if is_result:
        name = f"{kind} of {media}" if isinstance(media, str) else kind
        return f"[{name}: left out, since the model takes {takes}]"
    name = show(kind) if media is None else f"{show(kind)} and {show(media)}"
    why = f": {pictures.refusal}" if kind in KINDS and pictures.refusal else ""
    raise bad(where, f": this server takes {takes}, got a part of type {name}{why}")


def joined(parts: list[Any]) -> Content:
    """The results of `part_of` as the content of a message."""
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    content: list[dict[str, Any]] = []
    for kind, run in groupby(parts, type):
        alike = list(run)
        content += [{"type": "text", "text": "\n".join(alike)}] if kind is str else alike
    return content


def arguments_of(arguments: Any) -> dict[str, Any]:
    """The arguments of a call as an object: templates and Anthropic's API take nothing else.

    Malformed arguments become a parameter that no tool has, so that the call fails.
    """
    value = arguments
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(arguments, strict=False)
            json.dumps(found, allow_nan=False)  # raises for numbers that JSON lacks, such as 1e999
            value = found
    if isinstance(value, dict):
        return value
    return {} if value in (None, "", []) else {"INVALID_JSON": arguments}


def function_call(
    fields: Mapping[str, Any], id_name: str, arguments: Any, where: str
) -> dict[str, Any]:
    """An entry of `tool_calls`.  id_name: the name of the field that holds the id.

    Raises ApiError (400) for a bad id or a missing name.
    """
    name = required_text(fields, "name", where)
    function = {"name": name, "arguments": arguments_of(arguments)}
    return {"id": optional(fields, id_name, str, where), "type": "function", "function": function}


def tool_message(
    fields: Mapping[str, Any],
    id_name: str,
    text_name: str,
    names: Mapping[Any, str],
    where: str,
    pictures: Pictures = TEXT_ONLY,
) -> dict[str, Any]:
    """A tool's result as a message.

    id_name, text_name: the names of the fields with the id of the call and with the result.
    names: the names of the tools, by call id.  Raises ApiError (400).
    """
    call_id = optional(fields, id_name, str, where)
    message = {"role": "tool", "tool_call_id": call_id}
    if call_id in names:
        message["name"] = names[call_id]
    content = content_of(fields.get(text_name), f"{where}.{text_name}", pictures, True)
    return {**message, "content": content}


def part_text(part: Any, where: str) -> str:
    """The text of one part.  Raises ApiError (400)."""
    if isinstance(part, str):
        return part
    kind = required_type(part, where)
    if (blocks := _blocks_of(part)) is not None:
        titles = [
            part.get(name) for name in ("title", "context") if isinstance(part.get(name), str)
        ]
        return "\n".join([*titles, text_of(blocks, where)])
    if kind not in (*_TEXT, "refusal"):
        raise bad(where, f": this server takes text only, got a part of type {show(kind)}")
    name = "refusal" if kind == "refusal" else "text"
    if not isinstance(text := part.get(name), str):
        raise must_be(f"{where}.{name}", "a string", text)
    return text


def _blocks_of(part: Mapping[str, Any]) -> Any:
    """The text or the blocks of one of Anthropic's documents or search results; None for other
    parts."""
    kind, source = part.get("type"), part.get("source")
    if kind == "search_result":
        return part.get("content")
    if kind == "document" and isinstance(source, Mapping):
        field = {"text": "data", "content": "content"}.get(type_of(source) or "", "")
        return source.get(field)
    return None
