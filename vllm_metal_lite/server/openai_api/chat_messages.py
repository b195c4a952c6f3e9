"""A conversation in OpenAI's form: the fields of a body, its tools, and messages for templates."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.engine.chat_checkpoints import Message
from vllm_metal_lite.server.body import Body
from vllm_metal_lite.server.content import arguments_of, content_of, parts_allowed
from vllm_metal_lite.server.conversations import ChatRequest, join_systems
from vllm_metal_lite.server.errors import bad, must_be
from vllm_metal_lite.server.fields import optional, required_text, type_of
from vllm_metal_lite.server.params import Unsupported
from vllm_metal_lite.server.pictures import TEXT_ONLY, Pictures
from vllm_metal_lite.server.request_tools import add_tool, check_named, function_tool, openai_choice

# The arguments of transformers' apply_chat_template that are not variables of a template.
_PARAMETERS = signature(PreTrainedTokenizerBase.apply_chat_template).parameters
_RESERVED = _PARAMETERS.keys() - {"self", "documents", "kwargs"} | {"messages"}
_ROLES = {"developer": "system", "function": "tool"}


class ConversationFields(Body):
    """A conversation's fields in chat completions and `/tokenize`, without its messages."""

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

    def conversation(
        self, messages: list[dict[str, Any]], pictures: Pictures = TEXT_ONLY
    ) -> ChatRequest:
        """The conversation to render.  Raises ApiError (400) for parts that cannot be rendered."""
        last = messages[-1] if messages else {}
        continues = self.continue_final_message or (
            # Other servers call the option `partial` or `prefix`.
            last.get("role") == "assistant" and True in (last.get("partial"), last.get("prefix"))
        )
        tools, choice = _tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        if continues and self.add_generation_prompt:
            raise bad("continue_final_message", " and add_generation_prompt cannot both be true")
        template = dict(self.chat_template_kwargs or {})
        if reserved := sorted(_RESERVED.intersection(template)):
            words = f" cannot set {reserved[0]}: it is not a variable of the template"
            raise bad("chat_template_kwargs", words)
        if self.documents is not None:
            template["documents"] = self.documents
        if continues:
            template["continue_final_message"] = True
        generation = not continues and self.add_generation_prompt is not False
        rendered = chat_messages(messages, pictures)
        end: Message = rendered[-1] if rendered else {}
        if not generation and end.get("role") == "assistant" and isinstance(end["content"], list):
            raise bad("messages", ": an answer with pictures cannot be continued")
        how: dict[str, Any] = {"effort": self.reasoning_effort, "pictures": pictures}
        return ChatRequest(rendered, template, generation, tools, choice, **how)


def _tools(definitions: Any, choice: Any, parallel: bool | None) -> tuple[list[Tool], ToolChoice]:
    """The tools of a request, and the calls that may or must come.  Raises ApiError (400)."""
    tools: dict[str, Tool] = {}
    for i, definition in enumerate(definitions or ()):
        where = f"tools.{i}"
        if (kind := type_of(definition)) != "function":
            raise must_be(f"{where}.type", "'function'", kind)
        where += ".function"
        add_tool(tools, function_tool(definition.get("function"), where), f"{where}.name")

    def name_of(chosen: Any, where: str) -> str:
        function = chosen.get("function") if isinstance(chosen, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        return check_named(name, tools, f"{where}.function.name")

    return list(tools.values()), openai_choice(choice, parallel, tools, ("function",), name_of)


def chat_messages(messages: list[dict[str, Any]], pictures: Pictures = TEXT_ONLY) -> list[Message]:
    """OpenAI's messages as chat templates want them.

    Content becomes text, or parts if it has pictures.  The system messages at the front become one.
    Roles that only OpenAI has get the name that templates know.  Fields that are null are left out.
    Raises ApiError (400).
    """
    rendered: list[Message] = []
    for i, message in enumerate(messages):
        rendered.append(_message(message, f"messages.{i}", rendered, pictures))
    return join_systems(rendered)


def _message(
    message: Mapping[str, Any], where: str, before: Sequence[Message], pictures: Pictures
) -> Message:
    role = required_text(message, "role", where)
    rendered = {name: value for name, value in message.items() if value is not None}
    rendered["role"] = _ROLES.get(role, role)
    allowed, content = parts_allowed(rendered["role"], before, pictures), message.get("content")
    rendered["content"] = content_of(content, f"{where}.content", *allowed)
    optional(message, "tool_call_id", str, where)
    call = rendered.pop("function_call", None)  # the older form
    calls = rendered.pop("tool_calls", None) or ([] if call is None else [{"function": call}])
    if not isinstance(calls, list):
        raise must_be(f"{where}.tool_calls", "a list", calls)
    if calls:
        rendered["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)
        ]
    return rendered


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call whose arguments are an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise must_be(where, "a call of a function with a name", call)
    optional(call, "id", str, where)
    arguments = arguments_of(function.get("arguments"))
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
