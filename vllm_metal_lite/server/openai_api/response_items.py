"""The input items of the Responses API as messages for chat templates."""

from collections.abc import Mapping
from typing import Any

from vllm_metal_lite.errors import show
from vllm_metal_lite.server.content import check_id, function_call, result_text, text_of
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.openai_api.freeform import PARAMETER
from vllm_metal_lite.server.openai_api.response_tools import flat_name
from vllm_metal_lite.server.prompts import Message, join_systems


def input_messages(items: Any, instructions: str | None) -> list[Message]:
    """The messages of a request.  Raises ApiError (400) for items that cannot be rendered.

    items: a question, or a list of items.
    """
    history = _History()
    if instructions:
        history.messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        message = f"input must be a string or a list of items, got {show(items)}"
        raise ApiError(400, message, param="input")
    for i, item in enumerate(items):
        history.add(item, f"input.{i}")
    return join_systems(history.messages)


class _History:
    """Messages so far.  Items of one turn of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reasoning = ""  # of the assistant's next message
        self._names: dict[Any, str] = {}  # of functions, by the id of the call

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, Mapping):
            raise ApiError(400, f"{where} must be an object, got {show(item)}", param=where)
        kind = item.get("type", "message")
        add = _ITEMS.get(kind) if isinstance(kind, str) else None
        if add is None:
            raise ApiError(
                400, f"{where}: input items of type {show(kind)} are not supported", param=where
            )
        add(self, item, where)

    def message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or not role:
            where += ".role"
            raise ApiError(
                400, f"{where} must be a non-empty string, got {show(role)}", param=where
            )
        text = text_of(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._said(text)
        else:
            self._other({"role": "system" if role == "developer" else role, "content": text})

    def function_call(self, item: Mapping[str, Any], where: str) -> None:
        self._call(item, item.get("arguments"), where)

    def custom_tool_call(self, item: Mapping[str, Any], where: str) -> None:
        self._call(item, {PARAMETER: item.get("input")}, where)

    def output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = item.get("call_id")
        check_id(call_id, f"{where}.call_id")
        message = {"role": "tool", "tool_call_id": call_id}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        self._other({**message, "content": result_text(item.get("output"), f"{where}.output")})

    def reasoning(self, item: Mapping[str, Any], where: str) -> None:
        """Thoughts that the client can read; encrypted ones are no text."""
        for name in "content", "summary":
            if parts := item.get(name):
                thoughts = [self._reasoning, text_of(parts, f"{where}.{name}")]
                self._reasoning = "\n".join(filter(None, thoughts))
                return

    def nothing(self, item: Mapping[str, Any], where: str) -> None:
        """Tools, which are no part of the messages; calls that the API's host has run."""

    def item_reference(self, item: Mapping[str, Any], where: str) -> None:
        raise ApiError(
            400,
            f"{where}: item_reference is not supported, because no response is stored: send the "
            "item itself",
            param=where,
        )

    def _call(self, item: Mapping[str, Any], arguments: Any, where: str) -> None:
        call_id = item.get("call_id")
        call = function_call(call_id, item.get("name"), arguments, where)
        function = call["function"]
        function["name"] = flat_name(item.get("namespace"), function["name"])
        if isinstance(call_id, str):
            self._names[call_id] = function["name"]
        self._assistant(calls=True).setdefault("tool_calls", []).append(call)

    def _said(self, text: str) -> None:
        """Text behind calls belongs to their message: their outputs must follow it directly."""
        last = self.messages[-1] if self.messages else {}
        is_behind = bool(last.get("tool_calls")) and not self._reasoning
        message = last if is_behind else self._assistant()
        message["content"] = "\n".join(filter(None, [message["content"], text]))

    def _assistant(self, calls: bool = False) -> Message:
        """The message that text, or calls, of the assistant belong to."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if self._reasoning or not calls or last["role"] != "assistant":
            last = {"role": "assistant", "content": ""}
            if self._reasoning:
                last["reasoning_content"] = self._reasoning
            self.messages.append(last)
            self._reasoning = ""
        return last

    def _other(self, message: Message) -> None:
        self._reasoning = ""
        self.messages.append(message)


_ITEMS = {
    "message": _History.message,
    "function_call": _History.function_call,
    "custom_tool_call": _History.custom_tool_call,
    "function_call_output": _History.output,
    "custom_tool_call_output": _History.output,
    "reasoning": _History.reasoning,
    "additional_tools": _History.nothing,
    "web_search_call": _History.nothing,
    "file_search_call": _History.nothing,
    "image_generation_call": _History.nothing,
    "code_interpreter_call": _History.nothing,
    "tool_search_call": _History.nothing,
    "tool_search_output": _History.nothing,
    "item_reference": _History.item_reference,
}
