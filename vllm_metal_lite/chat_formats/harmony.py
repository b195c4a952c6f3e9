"""Harmony, of gpt-oss: messages with headers that name a channel, and a recipient for calls.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The recipient may precede the channel.  Text in the channel `commentary` is for the user.  If a call
names an unknown tool, the user sees the body of the message without its header.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress

from vllm_metal_lite.chat_formats.calls import CallWriter, json_arguments
from vllm_metal_lite.chat_formats.chat_format import ChatFormat, Thoughts
from vllm_metal_lite.chat_formats.events import Trimmed
from vllm_metal_lite.chat_formats.grammars import (
    SpecialTokens,
    named_by,
    schema_of,
    text_without,
    texts,
)
from vllm_metal_lite.chat_formats.history import one_call_each, text_as_thoughts
from vllm_metal_lite.chat_formats.reader import CutShort, Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = "<|end|>", "<|call|>", "<|return|>"
_USER_CHANNELS = "commentary", "final"  # channels of text for the user
_TO = " to="
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


def _read(reader: Reader, calls: CallWriter, text: Trimmed, reasoning: Trimmed) -> Reading[None]:
    begun: str | None = None
    with suppress(CutShort):
        if (yield from reader.begins(_TO)):  # the answer continues the header of the prompt
            begun = _TO
    while True:
        if begun is None or begun in _ENDS:  # text without a header is for the user
            begun = yield from reader.pass_until([_START, _CHANNEL, *_ENDS], text)
        if begun is None:
            return
        if begun not in _ENDS:
            header = [begun]
            begun = yield from reader.pass_until([_MESSAGE, _START, *_ENDS], header.append)
            if begun == _MESSAGE:  # a header without a message says nothing
                begun = yield from _body(reader, calls, text, reasoning, "".join(header))


def _body(
    reader: Reader, calls: CallWriter, text: Trimmed, reasoning: Trimmed, header: str
) -> Reading[str | None]:
    """Read the text of a message, and the marker after it; returns the marker."""
    channel, recipient = _NAME.search(header), _RECIPIENT.search(header)
    ends = [*_ENDS, _START, _CHANNEL]
    if recipient is not None and calls.knows(recipient[1]):
        text.at_marker()
        calls.begin(recipient[1])
        try:  # a marker within a string is text
            yield from json_arguments(reader, calls.arguments, *_ENDS)
        except CutShort:
            reader.take(len(reader.rest))
            calls.cut()
            return None
        except Malformed:
            calls.arguments(reader.recorded or "")
        found = None
        with suppress(CutShort):  # a marker that has begun is no argument
            found = yield from reader.before(ends, calls.arguments)
        reader.take(len(reader.rest if found is None else found))
        calls.end()
        return found
    is_thought = recipient is None and channel is not None and channel[1] not in _USER_CHANNELS
    out = reasoning if is_thought else text
    out.at_marker()
    end = yield from reader.pass_until(ends, out)
    text.at_marker()
    return end


def _grammar(tools: Sequence[Tool], choice: ToolChoice, special: SpecialTokens, final: str) -> str:
    """The grammar of thoughts and words for the user, then one call; if no call is demanded, a call
    or `final`.  Only thoughts precede a `final` of a given form."""
    allowed = named_by(r"[^\s<]+", tools, choice)
    answers = [f"before* call_{i}" for i in range(len(allowed))]
    if choice.mode in ("auto", "none"):
        answers.append(f"{'thoughts' if final else 'before'}* final")
    analysis, commentary, last = (
        texts(f"{_CHANNEL}{name}{_MESSAGE}", special) for name in ("analysis", *_USER_CHANNELS)
    )
    end = texts(f"<|end|>{_START}assistant", special)
    lines = [
        f"start: {' | '.join(answers)}",
        f"thoughts: {analysis} TEXT {end}",
        f"before: thoughts | {commentary} TEXT {end}",
        f"final: {last} {final or 'TEXT'}",
        f"TEXT: {text_without(_START, _CHANNEL, _MESSAGE, *_ENDS)}",
    ]
    for i, tool in enumerate(allowed):
        head = f"{_CHANNEL}commentary to=functions.{tool.name} {_CONSTRAIN}json{_MESSAGE}"
        lines.append(f"call_{i}: {texts(head, special)} args_{i}")
        lines.append(f"args_{i}: %json {json.dumps(schema_of(tool))}")
    return "\n".join(lines)


HARMONY = ChatFormat(
    "harmony",
    (_CHANNEL, _MESSAGE, "analysis"),
    # Calls are in `commentary`, or name a recipient.
    (f"{_CHANNEL}commentary", f"{_CHANNEL}analysis to", f"{_START}assistant to"),
    (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS),
    thoughts=Thoughts(f"{_CHANNEL}analysis{_MESSAGE}", f"<|end|>{_START}assistant", True),
    read_answer=_read,
    grammar=_grammar,
    adapt=lambda messages: one_call_each(text_as_thoughts(messages)),
)
