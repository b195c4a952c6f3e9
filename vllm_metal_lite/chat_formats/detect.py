"""Finds a model's format in its chat template, and tests it on a call that the template writes."""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from vllm_metal_lite.chat_formats import (
    gemma,
    harmony,
    json_markers,
    json_sections,
    mistral,
    pythonic,
    tagged,
)
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.events import Arguments, ToolCall, ToolCallEnd
from vllm_metal_lite.chat_formats.history import Adapt
from vllm_metal_lite.chat_formats.parser import ChatParser
from vllm_metal_lite.chat_formats.tool import Tool

# Renders (messages, tools, add_generation_prompt) to text; may raise anything.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]], bool], str]

PLAIN = ChatFormat("plain", thoughts=None)
THINKING = ChatFormat("thinking")
_MODULES = gemma, harmony, json_markers, json_sections, mistral, pythonic, tagged
FORMATS: dict[str, ChatFormat] = {"plain": PLAIN, "thinking": THINKING} | {
    value.name: value
    for module in _MODULES
    for value in vars(module).values()
    if isinstance(value, ChatFormat)
}
# Some templates of LFM2 list tools but write no calls.  Then the vocabulary decides.
_LFM2_TOKENS = "<|tool_call_start|>", "<|tool_call_end|>"

# Some templates need a description of each parameter.
_PARAMETERS = {
    "path": {"type": "string", "description": "Of the file."},
    "limit": {"type": "integer", "description": "Most lines."},
}
_SCHEMA = {"type": "object", "properties": _PARAMETERS, "required": ["path"]}
TOOL = Tool("read_canary", "Read a file.", _SCHEMA)
ARGUMENTS = {"path": "src/canary.txt", "limit": 3}
_USER = {"role": "user", "content": "Read it."}


def detect(template: str, render: Render, vocabulary: Container[str] = ()) -> ChatFormat:
    """The format of a chat template; "thinking" or "plain", which have no calls, if none is known.

    render: renders by the template.  vocabulary: tokens with a meaning, such as marks of thoughts.
    A format fits if all its signs are in the template, or in a call that the template writes, and
    if the format reads this call.  Of several that fit, the one with the longest signs is chosen.
    """
    written = written_calls(render)
    shown = template + "".join(written)
    signed = [f for f in FORMATS.values() if f.signs and all(sign in shown for sign in f.signs)]
    for chat_format in sorted(signed, key=lambda f: -len("".join(f.signs))):
        answers = written_calls(render, chat_format.adapt)
        if not answers or any(reads(chat_format, answer) for answer in answers):
            return chat_format
    has_tokens = all(token in vocabulary for token in _LFM2_TOKENS)
    if has_tokens and not written and any(TOOL.name in text for text in _texts(render, [_USER])):
        return pythonic.LFM2
    return THINKING if "</think>" in shown or "</think>" in vocabulary else PLAIN


def written_calls(render: Render, adapt: Adapt | None = None) -> list[str]:
    """A call as a template writes it: after the generation prompt, and after the user's turn.

    Some templates take arguments as an object, others as a string; some take no empty content.
    Empty: the template writes no calls.
    """
    starts = _texts(render, [_USER]) + _texts(render, [_USER], generation=False)
    found = []
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        function = {"name": TOOL.name, "arguments": arguments}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        for content in ("", None):
            answer = {"role": "assistant", "content": content, "tool_calls": [call]}
            messages: list[Mapping[str, Any]] = [_USER, answer]
            for whole in _texts(render, adapt(messages) if adapt else messages, generation=False):
                for start in starts:
                    found.append(whole[len(commonprefix([start, whole])) :])  # noqa: RUF071
    return [text for text in found if TOOL.name in text]


def reads(chat_format: ChatFormat, answer: str) -> bool:
    """Whether a format finds the call in an answer."""
    parser = ChatParser(chat_format, [TOOL])
    events = [*parser.feed(answer), *parser.close()]
    calls = [event for event in events if isinstance(event, ToolCall | ToolCallEnd)]
    if calls != [ToolCall(TOOL.name), ToolCallEnd()]:
        return False
    said = "".join(event.text for event in events if isinstance(event, Arguments))
    return bool(json.loads(said) == ARGUMENTS)


def _texts(
    render: Render, messages: Sequence[Mapping[str, Any]], generation: bool = True
) -> list[str]:
    """A conversation as text; empty if the template refuses it."""
    try:
        return [render([dict(m) for m in messages], [TOOL.for_template()], generation)]
    except Exception:  # templates raise any error
        return []
