"""Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

Messages are made of blocks.  `conversation` renders them as chat templates want them; MessageReply
gives the answer as blocks, whole or as events.
"""

import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from starlette.responses import JSONResponse, Response

from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.engine.chat_checkpoints import Message
from vllm_metal_lite.errors import show
from vllm_metal_lite.rules import whole
from vllm_metal_lite.server.blocks import Blocks
from vllm_metal_lite.server.body import Body
from vllm_metal_lite.server.content import (
    arguments_of,
    function_call,
    joined,
    part_of,
    part_text,
    parts_allowed,
    text_of,
    tool_message,
)
from vllm_metal_lite.server.conversations import ChatRequest, join_systems, render
from vllm_metal_lite.server.errors import bad, error_event, must_be
from vllm_metal_lite.server.fields import type_of
from vllm_metal_lite.server.params import SamplingFields, Unsupported
from vllm_metal_lite.server.pictures import TEXT_ONLY, Pictures
from vllm_metal_lite.server.request_tools import add_tool, check_demand, check_named, function_tool
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.stream import event
from vllm_metal_lite.server.turns import answer
from vllm_metal_lite.server.whole_json import whole_json
from vllm_metal_lite.server.worker.messages import Delta
from vllm_metal_lite.server.worker.request_state import RequestState

# A header that Claude Code puts before its system prompt.  Its text changes with each request, so
# no two prompts would share a prefix.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


def conversation_of(
    messages: list[dict[str, Any]], system: Any, pictures: Pictures = TEXT_ONLY
) -> ChatRequest:
    """The conversation to render.  If the last message is the assistant's, the answer continues it.

    Raises ApiError (400) for blocks that cannot be rendered.
    """
    rendered: list[Message] = []
    if text := _BILLING.sub("", text_of(system, "system")):
        rendered.append({"role": "system", "content": text})
    names: dict[Any, str] = {}
    for i, message in enumerate(messages):
        allowed = parts_allowed(message.get("role"), rendered, pictures)
        rendered += _messages(message, f"messages.{i}", names, *allowed)
    last, how = rendered[-1] if rendered else {"role": ""}, dict[str, Any]()
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        how = {"template": {"continue_final_message": True}, "add_generation_prompt": False}
    return ChatRequest(join_systems(rendered), pictures=pictures, **how)


def _messages(
    message: Mapping[str, Any],
    where: str,
    names: dict[Any, str],
    pictures: Pictures,
    is_result: bool,
) -> Iterator[Message]:
    """The messages that one of Anthropic's becomes: the results of tools have their own role.

    names: the tools' names, by call id; a result has only the id.
    pictures, is_result: see `parts_allowed`.
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
        yield from _user(role, blocks, where, names, pictures, is_result)


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
        elif kind != "redacted_thinking":  # these thoughts are encrypted
            texts.append(part_text(block, at))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(
    role: str,
    blocks: list[Any],
    where: str,
    names: dict[Any, str],
    pictures: Pictures,
    is_result: bool,
) -> Iterator[Message]:
    parts: list[Any] = []
    has_results = any(type_of(block) == "tool_result" for block in blocks)
    for i, block in enumerate(blocks):
        at = f"{where}.{i}"
        if type_of(block) != "tool_result":
            parts.append(part_of(block, at, pictures, has_results or is_result))
            continue
        if parts:
            yield {"role": role, "content": joined(parts)}
            parts = []
        yield tool_message(block, "tool_use_id", "content", names, at, pictures)
    if parts or not has_results:
        yield {"role": role, "content": joined(parts)}


PING = event("ping")
# Block type -> the type of its deltas, and the field of a delta that holds the text.
_DELTA_TYPES = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageReply(Blocks[bytes]):
    """The reply to a request, in content blocks.  The last block may still grow."""

    def __init__(self, request: RequestState, deltas: AsyncIterator[Delta], model: str) -> None:
        self._request, self._deltas, self._model = request, deltas, model
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # the texts of the last block
        self._last = Delta(0, [])  # the latest part of the answer

    async def whole(self) -> dict[str, Any]:
        """The JSON of the reply, at its end.  Raises ApiError if it has failed."""
        async for _ in self._news():
            pass
        return self._message(self._blocks, **self._ending())

    async def stream(self) -> AsyncIterator[bytes]:
        """The events.  The first counts the whole prompt as uncached, because the engine has not
        looked yet; `message_delta` has the right counts."""
        yield event("message_start", message=self._message([]))
        yield PING
        try:
            async for news in self._news():
                yield news
            yield event("message_delta", delta=self._ending(), usage=self._usage())
            yield event("message_stop")
        except Exception as e:
            yield error_event(e, "/v1/messages")

    async def _news(self) -> AsyncIterator[bytes]:
        async for delta in self._deltas:
            self._last = delta
            if news := b"".join(self.take(delta.events)):
                yield news
        yield b"".join(self.close())

    def _open(self, name: str) -> Iterator[bytes]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if self.kind == "thoughts":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif self.kind == "call":
            call_id = f"toolu_{uuid.uuid4().hex[:24]}"
            block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        self._texts = []
        self._blocks.append(block)
        yield self._event("start", content_block=block)

    def _grow(self, text: str) -> Iterator[bytes]:
        self._texts.append(text)
        kind, name = _DELTA_TYPES[self._blocks[-1]["type"]]
        yield self._event("delta", delta={"type": kind, name: text})

    def _end(self, is_whole: bool) -> Iterator[bytes]:
        text, block = "".join(self._texts), self._blocks[-1]
        if self.kind == "call":
            block["input"] = arguments_of(text)
        else:
            block[block["type"]] = text
        if self.kind == "thoughts":  # clients need a signature, and do not check its value
            yield self._event("delta", delta={"type": "signature_delta", "signature": ""})
        yield self._event("stop")

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event(f"content_block_{kind}", index=len(self._blocks) - 1, **fields)

    def _message(self, content: list[dict[str, Any]], **ending: str | None) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **ending,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """input_tokens excludes cached tokens, as in Anthropic's API."""
        request = self._request
        cached = request.num_cached_tokens
        return {
            "input_tokens": len(request.prompt_token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": request.num_tokens,
        }

    def _ending(self) -> dict[str, Any]:
        reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
        reason, stop = reasons.get(self._last.finish_reason or ""), self._last.stop_reason
        if reason is None and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": reason or "end_turn", "stop_sequence": None}


_MODES: dict[str, Literal["auto", "required", "none", "named"]] = {
    "auto": "auto",
    "any": "required",
    "none": "none",
    "tool": "named",
}


class CountTokensRequest(Body):
    """The fields that make the prompt."""

    messages: list[dict[str, Any]]
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thinking: Any = None
    mcp_servers: Unsupported = None
    output_format: dict[str, Any] | None = None

    def conversation(self, pictures: Pictures = TEXT_ONLY) -> ChatRequest:
        """The conversation to render.  Raises ApiError (400) for features that are missing here."""
        tools, choice = message_tools(self.tools, self.tool_choice)
        enabled, effort, budget = thinking_of(self.thinking, self.output_config)
        conversation = conversation_of(self.messages, self.system, pictures)
        thinking: dict[str, Any] = {"enable_thinking": enabled, "effort": effort}
        return replace(conversation, tools=tools, choice=choice, thinking_budget=budget, **thinking)


class MessagesRequest(CountTokensRequest, SamplingFields):
    """In this API `max_tokens` has no default."""

    max_tokens: Any
    stop_sequences: Any = None

    def check(self) -> None:
        if self.max_tokens is None:
            raise bad("max_tokens", ": Field required, got None")

    def form(self) -> tuple[Any, str]:
        if self.output_format is not None:  # the older name
            return self.output_format, "output_format"
        return (self.output_config or {}).get("format"), "output_config.format"


async def create_message(serving: Serving, body: MessagesRequest) -> Response:
    conversation = body.conversation(serving.pictures())
    request, deltas = await answer(serving, body, conversation, "msg_")
    reply = MessageReply(request, deltas, serving.model_name)
    if body.stream:
        return serving.stream(reply.stream(), PING)
    whole = await reply.whole()
    return await whole_json(lambda: whole)


async def count_tokens(serving: Serving, body: CountTokensRequest) -> Response:
    conversation = body.conversation(serving.pictures())
    rendered = await render(serving.model, conversation, to_run=False)
    return JSONResponse({"input_tokens": len(rendered.token_ids)})


def message_tools(definitions: Any, choice: Any) -> tuple[list[Tool], ToolChoice]:
    """The tools of a request, and the calls that may or must come.

    Tools that Anthropic's servers would run (web search, ...) are refused: leaving them out would
    change the request.
    """
    tools: dict[str, Tool] = {}
    for i, definition in enumerate(definitions or ()):
        where = f"tools.{i}"
        if (kind := type_of(definition)) not in (None, "custom"):
            raise bad(where, f": tools of type {show(kind)} are not supported")
        add_tool(tools, function_tool(definition, where, "input_schema"), f"{where}.name")
    return list(tools.values()), ToolChoice() if choice is None else _choice(tools, choice)


def _choice(tools: dict[str, Tool], choice: Any) -> ToolChoice:
    where, kind = "tool_choice", type_of(choice)
    if kind not in _MODES:
        raise must_be(f"{where}.type", "auto, any, tool or none", kind)
    name = check_named(choice.get("name"), tools, f"{where}.name") if kind == "tool" else None
    parallel = choice.get("disable_parallel_tool_use") is not True
    return check_demand(ToolChoice(_MODES[kind], name, parallel), tools)


def thinking_of(thinking: Any, output_config: Any) -> tuple[bool | None, str | None, int | None]:
    """(whether to think, the effort, the budget of thoughts in tokens).  None: the request does not
    say.

    thinking: {"type": "enabled", "budget_tokens": N}, {"type": "disabled"}, {"type": "adaptive"}.
    output_config: {"effort": ...}.
    """
    enabled = budget = None
    if thinking is not None:
        kind = type_of(thinking)
        if kind not in ("enabled", "disabled", "adaptive"):
            raise must_be("thinking.type", "enabled, disabled or adaptive", kind)
        if kind != "adaptive":
            enabled = kind == "enabled"
        budget = whole(thinking.get("budget_tokens")) if enabled else None
        if budget is not None and (type(budget) is not int or budget < 1):
            raise must_be("thinking.budget_tokens", "an integer of at least 1", budget)
    effort = (output_config or {}).get("effort")
    return enabled, effort if isinstance(effort, str) else None, budget
