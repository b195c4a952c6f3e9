"""The form of an answer: the calls that it must hold, and what the request asks for beside."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from json import dumps, loads

from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.errors import show
from vllm_metal_lite.server.errors import bad
from vllm_metal_lite.structured_params import WHITESPACE, StructuredOutputsParams


def answer_form(
    chat_format: ChatFormat,
    special_tokens: Mapping[str, int],
    tools: Sequence[Tool],
    choice: ToolChoice,
    form: StructuredOutputsParams | None,
) -> StructuredOutputsParams | None:
    """What an answer behind its thoughts must be; None: anything.

    form: of an answer that calls nothing.
    Calls that are demanded follow the grammar of the model's format.  Where calls are possible,
    they follow it if a tool is strict, or if the answer could not hold them by `form`, a JSON
    schema; other forms leave no room for calls.  Raises ApiError (400) for demanded calls, and for
    strict tools, where the format has no grammar.
    """
    why = f"the model's format ({chat_format.name}) has no grammar for calls"
    if choice.mode in ("required", "named"):
        if chat_format.grammar is None:
            raise bad("tool_choice", f" must be 'auto' or 'none': {why}")
        return _lark(chat_format.grammar(tools, choice, special_tokens))
    if choice.mode == "none" or not tools or not chat_format.has_calls:
        return form
    if chat_format.grammar is None:
        if strict := [tool.name for tool in tools if tool.strict]:
            raise bad("tools", f": {show(strict[0])} cannot be strict: {why}")
        return form
    if form is None:
        if not any(tool.strict for tool in tools):
            return None
        return _lark(chat_format.grammar(tools, choice, special_tokens))
    if form.json is None and not form.json_object:
        return form
    schema = {"type": "object"} if form.json is None else loads(str(form.json))
    if not isinstance(schema, dict):
        return form
    schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    calls = chat_format.grammar(tools, replace(choice, mode="required"), special_tokens)
    calls = re.sub("^start:", "calls:", calls, flags=re.MULTILINE)
    return _lark(f"start: calls | final\nfinal: %json {dumps(schema)}\n{calls}")


def _lark(grammar: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(grammar=grammar)
