"""The text of a message's content: a string, or a list of parts."""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_metal_lite.errors import show
from vllm_metal_lite.server.errors import ApiError

# By type; those of OpenAI's chat, of Responses, and of Anthropic.
_TEXT = ("text", "input_text", "output_text")


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
    return "\n".join(_part(part, f"{where}.{i}") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
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
