"""The fields of a body that hold a conversation, and OpenAI's messages as templates want them."""

from collections.abc import Mapping
from typing import Any

from vllm_metal_lite.chat_formats.tool import ToolChoice
from vllm_metal_lite.errors import show
from vllm_metal_lite.server.content import arguments_of, check_id, result_text, text_of
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.openai_api.chat_tools import chat_tools
from vllm_metal_lite.server.params import Unsupported
from vllm_metal_lite.server.prompts import Conversation, Message, join_systems
from vllm_metal_lite.server.server import Body

# Arguments of transformers' apply_chat_template that are no variables of a template.
_RESERVED = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)
_ROLES = {"developer": "system", "function": "tool"}


class ConversationFields(Body):
    """What chat completions and `/tokenize` say about a conversation, beside its messages."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Unsupported = None
    chat_template: Unsupported = None

    def conversation(self, messages: list[dict[str, Any]]) -> tuple[Conversation, ToolChoice]:
        """What is rendered, and the calls that the answer may or must hold.  Raises ApiError (400)
        for what cannot be rendered."""
        begun = messages[-1] if messages else {}
        goes_on = self.continue_final_message or (
            # Under the names of other servers.
            begun.get("role") == "assistant" and True in (begun.get("partial"), begun.get("prefix"))
        )
        tools, choice = chat_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        if goes_on and self.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message and add_generation_prompt cannot both be true",
                param="continue_final_message",
            )
        template = dict(self.chat_template_kwargs or {})
        if reserved := sorted(_RESERVED.intersection(template)):
            raise ApiError(
                400,
                f"chat_template_kwargs holds variables of the template, and {reserved[0]} is none",
                param="chat_template_kwargs",
            )
        if self.documents is not None:
            template["documents"] = self.documents
        if goes_on:
            template["continue_final_message"] = True
        generation = self.add_generation_prompt
        if generation is None:
            generation = not goes_on
        conversation = Conversation(
            chat_messages(messages), template, generation, tools, effort=self.reasoning_effort
        )
        return conversation, choice


def chat_messages(messages: list[dict[str, Any]]) -> list[Message]:
    """OpenAI's messages as chat templates want them.

    Content becomes text.  The system messages at the front become one.  Roles that only OpenAI has
    get the name that templates know.  Fields that are null are left out.  Raises ApiError (400).
    """
    return join_systems([_message(message, f"messages.{i}") for i, message in enumerate(messages)])


def _message(message: Mapping[str, Any], where: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _bad(f"{where}.role must be a non-empty string, got {show(role)}", f"{where}.role")
    rendered = {name: value for name, value in message.items() if value is not None}
    rendered["role"] = _ROLES.get(role, role)
    read = result_text if rendered["role"] == "tool" else text_of
    rendered["content"] = read(message.get("content"), f"{where}.content")
    check_id(message.get("tool_call_id"), f"{where}.tool_call_id")
    call = rendered.pop("function_call", None)  # the older form
    calls = rendered.pop("tool_calls", None) or ([] if call is None else [{"function": call}])
    if not isinstance(calls, list):
        raise _bad(f"{where}.tool_calls must be a list, got {show(calls)}", f"{where}.tool_calls")
    if calls:
        rendered["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)
        ]
    return rendered


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call whose arguments are an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _bad(f"{where} must be a call of a function with a name, got {show(call)}", where)
    check_id(call.get("id"), f"{where}.id")
    arguments = arguments_of(function.get("arguments"))
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _bad(message: str, where: str) -> ApiError:
    return ApiError(400, message, param=where)
