"""Hermes: `<tool_call>` and a JSON object with name and arguments.

Qwen 2.5 and 3, Hermes 2 and 3, SmolLM 3, and many others.
"""

from vllm_metal_lite.chat_formats.calls import CallWriter, json_call
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import json_calls
from vllm_metal_lite.chat_formats.reader import Reader, Reading

_START, _END = "<tool_call>", "</tool_call>"


def _read(reader: Reader, calls: CallWriter, marker: str) -> Reading[None]:
    yield from json_call(reader, calls, end=_END)
    yield from reader.skip_space()
    yield from reader.has(_END)  # a model may end its answer without


HERMES = ChatFormat(
    "hermes",
    call_starts=(_START,),
    call_ends=(_END,),
    read_calls=_read,
    think_start="<think>",
    think_end="</think>",
    grammar=json_calls(
        start=_START, end=_END, head='\n{"name": ', middle=', "arguments": ', tail="}\n",
        between="\n",
    ),
)  # fmt: skip
