"""JSON objects with name and arguments between markers, or a list of them; Llama 3 needs no marker.

Qwen 2.5 and 3, SmolLM 3 and many others use Hermes too.
"""

from functools import partial

from vllm_metal_lite.chat_formats.calls import CallWriter, json_call, json_list
from vllm_metal_lite.chat_formats.chat_format import THINK, ChatFormat, Thoughts
from vllm_metal_lite.chat_formats.grammars import json_calls
from vllm_metal_lite.chat_formats.history import one_call_each
from vllm_metal_lite.chat_formats.reader import Reader, Reading


def _read(reader: Reader, calls: CallWriter, *, end: str, name_key: str) -> Reading[None]:
    """Read a list of calls, or one call."""
    if (yield from reader.peek()) == "[":
        yield from json_list(reader, calls, name_key)
    else:
        yield from json_call(reader, calls, name_key, end=end)
    yield from reader.has(end)  # a model may end its answer without


def _format(
    name: str,
    signs: tuple[str, ...],
    start: str,
    end: str,
    thoughts: Thoughts = THINK,
    name_key: str = "name",
    **grammar: str,
) -> ChatFormat:
    """name_key: the key of a call's name.  grammar: see `json_calls`."""
    read = partial(_read, end=end, name_key=name_key)
    calls = json_calls(start=start, quoted=True, **grammar)
    return ChatFormat(name, signs, (start,), (end or "\n",), read, calls, thoughts)


def _objects(name: str, prefix: str, *signs: str) -> ChatFormat:
    """prefix: starts each marker's name, such as `longcat_`.  signs: those beside the marker."""
    start, end = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    return _format(
        name,
        (start, *signs),
        start,
        end,
        Thoughts(f"<{prefix}think>", f"</{prefix}think>"),
        head='\n{"name": ',
        middle=', "arguments": ',
        tail=f"}}\n{end}",
        between="\n",
    )


def _lists(name: str, start: str, end: str, *signs: str) -> ChatFormat:
    """signs: those beside the marker `start`."""
    return _format(
        name,
        (start, *signs),
        start,
        end,
        opening="[",
        head='{"name": ',
        middle=', "arguments": ',
        tail="}",
        between=", ",
        close=f"]{end}",
    )


HERMES = _objects("hermes", "")
LONGCAT = _objects("longcat", "longcat_", '"arguments"')
# Written by Apriel, Jamba and MiniMax M1.
TOOL_CALLS = _lists("tool_calls_json", "<tool_calls>", "</tool_calls>", "</tool_calls>")
GRANITE_3 = _lists("granite", "<|tool_call|>", "", "JSON list")
NEMOTRON = _lists("nemotron_json", "<TOOLCALL>", "</TOOLCALL>")
# Written by Command R7B and Command A.
COHERE = _format(
    "cohere",
    ("<|START_ACTION|>", "tool_name"),
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),
    name_key="tool_name",
    opening="[",
    head='\n    {"tool_call_id": "0", "tool_name": ',
    middle=', "parameters": ',
    tail="}",
    between=",",
    close="\n]<|END_ACTION|>",
)


def _read_llama(reader: Reader, calls: CallWriter) -> Reading[None]:
    while (yield from json_call(reader, calls, between=";")):
        pass


_TAG, _NAME, _VALUES = "<|python_tag|>", '{"name": ', ', "parameters": '
# Written by Llama 3.1 to 3.3.
LLAMA_3 = ChatFormat(
    "llama3_json",
    ('"parameters": ', "<|start_header_id|>", "ipython"),
    (_TAG,),
    ("\n",),
    _read_llama,
    json_calls(start="", bare=_TAG, head=_NAME, middle=_VALUES, tail="}", between="; "),
    thoughts=None,
    bare_start="{",
    adapt=one_call_each,
)
