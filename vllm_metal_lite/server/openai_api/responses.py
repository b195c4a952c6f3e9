"""`/v1/responses`, without a store: each request brings the whole conversation as input items."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from vllm_metal_lite.engine.chat_checkpoints import Message
from vllm_metal_lite.errors import show
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.content import (
    content_of,
    function_call,
    parts_allowed,
    text_of,
    tool_message,
)
from vllm_metal_lite.server.conversations import ChatRequest, join_systems
from vllm_metal_lite.server.errors import bad, must_be
from vllm_metal_lite.server.fields import required_text
from vllm_metal_lite.server.openai_api.logprobs import TokenNames, chat_logprobs
from vllm_metal_lite.server.openai_api.response_events import ResponseReply
from vllm_metal_lite.server.openai_api.response_tools import PARAMETER, ResponseTools, flat_name
from vllm_metal_lite.server.params import SamplingFields, Unsupported
from vllm_metal_lite.server.pictures import TEXT_ONLY, Pictures
from vllm_metal_lite.server.server import Serving
from vllm_metal_lite.server.turns import answer
from vllm_metal_lite.server.whole_json import whole_json


def input_messages(
    items: Any, instructions: str | None, pictures: Pictures = TEXT_ONLY
) -> list[Message]:
    """The messages of a request.  Raises ApiError (400) for items that cannot be rendered.

    items: a question, or a list of items.
    """
    history = _History(pictures)
    if instructions:
        history.messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise must_be("input", "a string or a list of items", items)
    for i, item in enumerate(items):
        history.add(item, f"input.{i}")
    if not history.messages:
        raise bad("input", " is empty")
    return join_systems(history.messages)


class _History:
    """Collects messages.  The items of one turn of the assistant become one message."""

    def __init__(self, pictures: Pictures) -> None:
        self._pictures = pictures
        self.messages: list[dict[str, Any]] = []
        self._reasoning = ""  # belongs to the assistant's next message
        self._names: dict[Any, str] = {}  # function names by the id of the call

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, Mapping):
            raise must_be(where, "an object", item)
        kind = str(item.get("type") or "message")
        if kind in _ITEMS:
            _ITEMS[kind](self, item, where)
        elif not _is_hosted(kind):
            raise bad(where, f": input items of type {show(item['type'])} are not supported")

    def message(self, item: Mapping[str, Any], where: str) -> None:
        role, content, where = (
            required_text(item, "role", where),
            item.get("content"),
            f"{where}.content",
        )
        if role == "assistant":
            self._said(text_of(content, where))
            return
        role = "system" if role == "developer" else role
        allowed = parts_allowed(role, self.messages, self._pictures)
        self._other({"role": role, "content": content_of(content, where, *allowed)})

    def function_call(self, item: Mapping[str, Any], where: str) -> None:
        self._call(item, item.get("arguments"), where)

    def custom_tool_call(self, item: Mapping[str, Any], where: str) -> None:
        self._call(item, {PARAMETER: item.get("input")}, where)

    def output(self, item: Mapping[str, Any], where: str) -> None:
        names, pictures = self._names, self._pictures
        self._other(tool_message(item, "call_id", "output", names, where, pictures))

    def reasoning(self, item: Mapping[str, Any], where: str) -> None:
        """Add thoughts that the client can read.  Encrypted thoughts have no text."""
        for name in "content", "summary":
            if parts := item.get(name):
                thoughts = [self._reasoning, text_of(parts, f"{where}.{name}")]
                self._reasoning = "\n".join(filter(None, thoughts))
                return

    def item_reference(self, item: Mapping[str, Any], where: str) -> None:
        why = "because no response is stored: send the item itself"
        raise bad(where, f": item_reference is not supported, {why}")

    def _call(self, item: Mapping[str, Any], arguments: Any, where: str) -> None:
        call = function_call(item, "call_id", arguments, where)
        function = call["function"]
        function["name"] = flat_name(item.get("namespace"), function["name"])
        self._names[call["id"]] = function["name"]
        self._assistant(calls=True).setdefault("tool_calls", []).append(call)

    def _said(self, text: str) -> None:
        """Add text.  Text after calls joins their message: outputs must follow calls directly."""
        last = self.messages[-1] if self.messages else {}
        follows_calls = bool(last.get("tool_calls")) and not self._reasoning
        message = last if follows_calls else self._assistant()
        message["content"] = "\n".join(filter(None, [message["content"], text]))

    def _assistant(self, calls: bool = False) -> dict[str, Any]:
        """The message that the assistant's text or calls belong to; a new one if needed."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if self._reasoning or not calls or last["role"] != "assistant":
            last = {"role": "assistant", "content": ""}
            if self._reasoning:
                last["reasoning_content"] = self._reasoning
            self.messages.append(last)
            self._reasoning = ""
        return last

    def _other(self, message: dict[str, Any]) -> None:
        self._reasoning = ""
        self.messages.append(message)


_ITEMS = {
    "message": _History.message,
    "function_call": _History.function_call,
    "custom_tool_call": _History.custom_tool_call,
    "function_call_output": _History.output,
    "custom_tool_call_output": _History.output,
    "reasoning": _History.reasoning,
    "item_reference": _History.item_reference,
}


def _is_hosted(kind: str) -> bool:
    """Whether items of this type are not for the model: additional tools, and the calls and outputs
    of tools that the API's host offers (`web_search_call`, `local_shell_call_output`, ...)."""
    is_call = kind.endswith(("_call", "_call_output", "tool_search_output"))
    return is_call or kind.startswith("mcp_") or kind == "additional_tools"


_LOGPROBS = "message.output_text.logprobs"


class ReasoningOptions(BaseModel):
    """effort: a variable of the chat template.  summary: if set, thoughts are shown as summary."""

    model_config = ConfigDict(extra="allow", strict=True)

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # the older name


class ResponsesRequest(SamplingFields):
    """Fields that no method reads have no effect.  `echo` repeats some of them in the response."""

    input: Any
    instructions: str | None = None
    max_output_tokens: Any = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_effort: str | None = None  # a field of chat completions that clients send here, too
    stream_options: Any = None
    background: Unsupported = None
    conversation: Unsupported = None
    previous_response_id: str | None = None
    prompt: Unsupported = None

    def check(self) -> None:
        if self.previous_response_id:
            why = "because no response is stored: send the whole conversation"
            raise bad("previous_response_id", f" is not supported, {why}")

    def form(self) -> tuple[Any, str]:
        return (self.text or {}).get("format"), "text.format"

    def thoughts(self) -> ReasoningOptions:
        options = self.reasoning or ReasoningOptions()
        return options.model_copy(update={"effort": options.effort or self.reasoning_effort})

    def sampling(self) -> dict[str, Any]:
        scored = self.top_logprobs or _LOGPROBS in (self.include or ())
        return {**super().sampling(), "logprobs": (self.top_logprobs or 0) if scored else None}

    def echo(self, model: str, params: SamplingParams, tools: ResponseTools) -> dict[str, Any]:
        """The fields of the response that repeat the request, with the values in effect."""
        extra = self.model_extra or {}
        return {
            "model": model,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": self.top_logprobs or 0,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "metadata": extra.get("metadata") or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": extra.get("prompt_cache_key"),
            "reasoning": self.thoughts().model_dump(),
            "safety_identifier": extra.get("safety_identifier"),
            "service_tier": "default",
            "store": False,
            "background": False,
            "text": {"format": {"type": "text"}, **(self.text or {})},
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": tools.definitions,
            "truncation": "disabled",
            "user": self.user,
        }


async def create_response(serving: Serving, body: ResponsesRequest) -> Response:
    parallel = body.parallel_tool_calls is not False
    tools = ResponseTools(body.tools, body.input, body.tool_choice, parallel)
    reasoning = body.thoughts()
    pictures = serving.pictures()
    conversation = ChatRequest(
        input_messages(body.input, body.instructions, pictures),
        tools=list(tools.tools.values()),
        choice=tools.choice,
        effort=reasoning.effort,
        pictures=pictures,
    )
    request, deltas = await answer(serving, body, conversation, "resp_")
    names, top = TokenNames(serving.model.tokenizer), body.top_logprobs or 0
    scores = partial(chat_logprobs, top=top, names=names)
    echo = body.echo(serving.model_name, request.params, tools)
    with_summary = (reasoning.summary or reasoning.generate_summary or "none") != "none"
    reply = ResponseReply(request, deltas, tools.callees, with_summary, echo, scores)
    if body.stream:
        return serving.stream(reply.stream(), reply.keep_alive)
    whole = await reply.whole()
    return await whole_json(lambda: whole)
