"""Hunyuan: `<tool_calls>`, and for each call a name and a block of code with JSON arguments."""

from vllm_metal_lite.chat_formats.calls import CallWriter, json_arguments
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import json_calls
from vllm_metal_lite.chat_formats.reader import Reader, Reading

_START, _END = "<tool_calls>", "</tool_calls>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_CODE, _CODE_END = "```json", "```"


def _read(reader: Reader, calls: CallWriter, marker: str) -> Reading[None]:
    yield from calls.section(lambda: _call(reader, calls), _CALL, _CALL_END, _END)


def _call(reader: Reader, calls: CallWriter) -> Reading[None]:
    name, _ = yield from reader.name(_CODE)
    calls.begin(name)
    yield from json_arguments(reader, calls.arguments)
    yield from reader.expect(_CODE_END)
    yield from reader.expect(_CALL_END)
    calls.end()


HUNYUAN = ChatFormat(
    "hunyuan",
    call_starts=(_START,),
    call_ends=(_END,),
    read_calls=_read,
    think_start="<think>",
    think_end="</think>",
    grammar=json_calls(
        start=_START, head=_CALL, middle=f"\n{_CODE}\n", tail=f"\n{_CODE_END}", end=_CALL_END,
        close=_END, quoted=False,
    ),
)  # fmt: skip
