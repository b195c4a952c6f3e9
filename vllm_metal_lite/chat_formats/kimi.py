"""Kimi K2: a section of calls with JSON arguments; the name is in the id, `functions.NAME:0`."""

from vllm_metal_lite.chat_formats.calls import CallWriter, json_arguments
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import json_calls
from vllm_metal_lite.chat_formats.history import with_call_ids
from vllm_metal_lite.chat_formats.reader import Reader, Reading

_START, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"


def _read(reader: Reader, calls: CallWriter, marker: str) -> Reading[None]:
    yield from calls.section(lambda: _call(reader, calls), _CALL, _CALL_END, _END)


def _call(reader: Reader, calls: CallWriter) -> Reading[None]:
    call_id, found = yield from reader.name(_ARGUMENTS, _CALL_END)
    name, _, _ = call_id.removeprefix("functions.").rpartition(":")
    calls.begin(name, call_id)
    if found == _ARGUMENTS:
        yield from json_arguments(reader, calls.arguments)
        yield from reader.expect(_CALL_END)
    calls.end()


def _call_id(name: str, number: int, given: str) -> str:
    return f"functions.{name}:{number}"


KIMI_K2 = ChatFormat(
    "kimi_k2",
    call_starts=(_START,),
    call_ends=(_END,),
    read_calls=_read,
    think_start="<think>",
    think_end="</think>",
    adapt=with_call_ids(_call_id),
    # The number behind the name is that of the call in the conversation; the format reads any.
    grammar=json_calls(
        start=_START, head=f"{_CALL}functions.", middle=f":0{_ARGUMENTS}", end=_CALL_END,
        close=_END, quoted=False,
    ),
)  # fmt: skip
