"""Probes a format: does it read the call that a chat template writes?"""

import json
from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.events import Arguments, ToolCall, ToolCallEnd
from vllm_metal_lite.chat_formats.history import Adapt
from vllm_metal_lite.chat_formats.parser import ChatParser
from vllm_metal_lite.chat_formats.tool import Tool

# A conversation as text, of (messages, tools, add_generation_prompt).  Raises anything.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]], bool], str]

# Some templates need a description of each parameter.
_PARAMETERS = {
    "path": {"type": "string", "description": "Of the file."},
    "limit": {"type": "integer", "description": "Most lines."},
}
_SCHEMA = {"type": "object", "properties": _PARAMETERS, "required": ["path"]}
TOOL = Tool("read_canary", "Read a file.", _SCHEMA)
ARGUMENTS = {"path": "src/canary.txt", "limit": 3}
_USER = {"role": "user", "content": "Read it."}


def shows_tools(render: Render) -> bool:
    """Whether a template shows the tools of a request to the model."""
    return any(TOOL.name in text for text in _texts(render, [_USER], True))


def written_calls(render: Render, adapt: Adapt | None = None) -> list[str]:
    """A call as a template writes it: after the generation prompt, and after the user's turn.

    Some templates take arguments as an object, others as a string; some take no empty content.
    Empty: the template writes no calls.
    """
    starts = [text for generation in (True, False) for text in _texts(render, [_USER], generation)]
    found = []
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        function = {"name": TOOL.name, "arguments": arguments}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        for content in ("", None):
            answer = {"role": "assistant", "content": content, "tool_calls": [call]}
            messages: list[Mapping[str, Any]] = [_USER, answer]
            for whole in _texts(render, adapt(messages) if adapt else messages, False):
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


def _texts(render: Render, messages: Sequence[Mapping[str, Any]], generation: bool) -> list[str]:
    """A conversation as text; empty if the template refuses it."""
    try:
        return [render([dict(m) for m in messages], [TOOL.for_template()], generation)]
    except Exception:  # templates raise any error
        return []
