"""Anthropic's messages, which are made of blocks, as chat templates want them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_metal_lite.engine.chat_checkpoints import Message
from vllm_metal_lite.server.content import (
    function_call,
    named,
    part_text,
    text_of,
    tool_message,
)
from vllm_metal_lite.server.conversations import ChatRequest, join_systems
from vllm_metal_lite.server.errors import must_be
from vllm_metal_lite.server.fields import type_of

# A header that Claude Code puts before its system prompt.  Its text changes with each request, so
# no two prompts would share a prefix.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def conversation(messages: list[dict[str, Any]], system: Any) -> ChatRequest:
    """The conversation to render.  If the last message is the assistant's, the answer continues it.

    Raises ApiError (400) for blocks that cannot be rendered.
    """
    rendered: list[Message] = []
    if text := _BILLING.sub("", text_of(system, "system")):
        rendered.append({"role": "system", "content": text})
    names: dict[Any, str] = {}
    for i, message in enumerate(messages):
        rendered += _messages(message, f"messages.{i}", names)
    last = rendered[-1] if rendered else {"role": ""}
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        template = {"continue_final_message": True}
        return ChatRequest(join_systems(rendered), template, add_generation_prompt=False)
    return ChatRequest(join_systems(rendered))


def _messages(message: Mapping[str, Any], where: str, names: dict[Any, str]) -> Iterator[Message]:
    """A message as one or more, because the results of tools have their own role.

    names: the tools' names by call id; a result has only the id.
    """
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise must_be(f"{where}.role", "user, assistant or system", role)
    blocks, where = message.get("content"), f"{where}.content"
    if not isinstance(blocks, list):
        yield {"role": role, "content": text_of(blocks, where)}
    elif role == "assistant":
        yield _assistant(blocks, where, names)
    else:
        yield from _user(role, blocks, where, names)


def _assistant(blocks: list[Any], where: str, names: dict[Any, str]) -> Message:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        at, kind = f"{where}.{i}", type_of(block)
        if kind == "tool_use":
            call = function_call(block, "id", block.get("input"), at)
            names[call["id"]] = call["function"]["name"]
            calls.append(call)
        elif kind == "thinking":
            thoughts.append(text_of(block.get("thinking"), f"{at}.thinking"))
        elif kind != "redacted_thinking":  # encrypted
            texts.append(part_text(block, at))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: list[Any], where: str, names: dict[Any, str]) -> Iterator[Message]:
    texts: list[str] = []
    has_results = any(type_of(block) == "tool_result" for block in blocks)
    for i, block in enumerate(blocks):
        at = f"{where}.{i}"
        if type_of(block) != "tool_result":
            texts.append(part_text(named(block) if has_results else block, at))
            continue
        if texts:
            yield {"role": role, "content": "\n".join(texts)}
            texts = []
        yield tool_message(block, "tool_use_id", "content", names, at)
    if texts or not has_results:
        yield {"role": role, "content": "\n".join(texts)}
