"""DeepSeek V3 and R1, and V3.1: a section of calls with JSON arguments.

V3 and R1 write `function` before the name, and the arguments as a block of code.
"""

from dataclasses import replace

from vllm_metal_lite.chat_formats.calls import CallWriter, json_arguments
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import json_calls
from vllm_metal_lite.chat_formats.reader import Reader, Reading

_START, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_CODE, _CODE_END = "```json", "```"


def _read(reader: Reader, calls: CallWriter, marker: str) -> Reading[None]:
    yield from calls.section(lambda: _call(reader, calls), _CALL, _CALL_END, _END)


def _call(reader: Reader, calls: CallWriter) -> Reading[None]:
    name, _ = yield from reader.name(_SEPARATOR)
    is_code = not calls.knows(name)
    if is_code:
        name, _ = yield from reader.name(_CODE)
    calls.begin(name)
    yield from json_arguments(reader, calls.arguments)
    if is_code:
        yield from reader.expect(_CODE_END)
    yield from reader.expect(_CALL_END)
    calls.end()


DEEPSEEK_V3_1 = ChatFormat(
    "deepseek_v31",
    call_starts=(_START,),
    call_ends=(_END,),
    read_calls=_read,
    think_start="<think>",
    think_end="</think>",
    grammar=json_calls(
        start=_START, head=_CALL, middle=_SEPARATOR, end=_CALL_END, close=_END, quoted=False
    ),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V3_1,
    name="deepseek_v3",
    grammar=json_calls(
        start=_START, head=f"{_CALL}function{_SEPARATOR}", middle=f"\n{_CODE}\n",
        tail=f"\n{_CODE_END}", end=_CALL_END, between="\n", close=_END, quoted=False,
    ),
)  # fmt: skip
