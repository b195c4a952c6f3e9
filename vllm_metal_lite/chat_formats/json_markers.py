"""JSON between markers: an object, or a list of objects."""

from functools import partial

from vllm_metal_lite.chat_formats.calls import CallWriter, json_call
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import json_calls
from vllm_metal_lite.chat_formats.reader import Reader, Reading


def _read(
    reader: Reader, calls: CallWriter, marker: str, *, end: str, name_key: str = "name"
) -> Reading[None]:
    is_list = (yield from reader.peek()) == "["
    if is_list:
        reader.take(1)
    last = "]" if is_list else end
    yield from json_call(reader, calls, name_key, end=last)
    while is_list and (yield from reader.peek()) == ",":
        reader.take(1)
        yield from json_call(reader, calls, name_key, end=last)
    if is_list:
        yield from reader.expect("]")
    yield from reader.skip_space()
    yield from reader.has(end)  # a model may end its answer without


def _lists(name: str, start: str, end: str) -> ChatFormat:
    """Lists of objects with name and arguments."""
    return ChatFormat(
        name,
        call_starts=(start,),
        call_ends=(end,) if end else (),
        read_calls=partial(_read, end=end),
        think_start="<think>",
        think_end="</think>",
        grammar=json_calls(
            start=start, opening="[", head='{"name": ', middle=', "arguments": ', tail="}",
            between=", ", close=f"]{end}",
        ),
    )  # fmt: skip


# Apriel, Jamba, MiniMax M1.
TOOL_CALLS = _lists("tool_calls_json", "<tool_calls>", "</tool_calls>")
GRANITE_3 = _lists("granite", "<|tool_call|>", "")
NEMOTRON = _lists("nemotron_json", "<TOOLCALL>", "</TOOLCALL>")
LONGCAT = ChatFormat(
    "longcat",
    call_starts=("<longcat_tool_call>",),
    call_ends=("</longcat_tool_call>",),
    read_calls=partial(_read, end="</longcat_tool_call>"),
    think_start="<longcat_think>",
    think_end="</longcat_think>",
    grammar=json_calls(
        start="<longcat_tool_call>", head='\n{"name": ', middle=', "arguments": ', tail="}\n",
        end="</longcat_tool_call>", between="\n",
    ),
)  # fmt: skip
# Command R7B and A.
COHERE = ChatFormat(
    "cohere",
    call_starts=("<|START_ACTION|>",),
    call_ends=("<|END_ACTION|>",),
    read_calls=partial(_read, end="<|END_ACTION|>", name_key="tool_name"),
    think_start="<|START_THINKING|>",
    think_end="<|END_THINKING|>",
    grammar=json_calls(
        start="<|START_ACTION|>", opening="[",
        head='\n    {"tool_call_id": "0", "tool_name": ', middle=', "parameters": ', tail="}",
        between=",", close="\n]<|END_ACTION|>",
    ),
)  # fmt: skip
