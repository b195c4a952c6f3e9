"""Mistral: `[TOOL_CALLS]` and a JSON list of calls; since version 11 of the tokenizer
`[TOOL_CALLS]NAME[ARGS]` and the arguments, for each call.
"""

from dataclasses import replace
from functools import partial
from hashlib import sha256

from vllm_metal_lite.chat_formats.calls import CallWriter, json_arguments, json_list
from vllm_metal_lite.chat_formats.chat_format import ChatFormat, Thoughts
from vllm_metal_lite.chat_formats.grammars import json_calls
from vllm_metal_lite.chat_formats.history import with_call_ids
from vllm_metal_lite.chat_formats.reader import CutShort, Malformed, Reader, Reading

_START, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read(reader: Reader, calls: CallWriter) -> Reading[None]:
    if (yield from reader.peek()) == "[":
        yield from json_list(reader, calls)
        return
    name, found = yield from calls.name(_ARGUMENTS, _ID)
    if found == _ID:
        yield from reader.until(_ARGUMENTS)
    calls.begin(name)
    try:
        yield from json_arguments(reader, calls.arguments, _START)
    except CutShort:
        raise
    except Malformed:  # up to the next marker, all text is the call's
        calls.arguments((reader.recorded or "").lstrip())
        yield from reader.before([_START, "\n"], calls.arguments)
    calls.end()


def _call_id(name: str, number: int, given: str) -> str:
    """Templates take nine letters and digits only."""
    if len(given) == 9 and given.isascii() and given.isalnum():
        return given
    return sha256(given.encode()).hexdigest()[:9]


MISTRAL = ChatFormat(
    "mistral",
    (_START, _ARGUMENTS),
    (_START,),
    ("\n",),
    _read,
    json_calls(start=_START, head="", middle=_ARGUMENTS, quoted=False, without="["),
    thoughts=Thoughts("[THINK]", "[/THINK]"),
    adapt=partial(with_call_ids, _call_id),
)
_NAME, _VALUES = '{"name": ', ', "arguments": '
_LIST = json_calls(
    start=_START, opening="[", head=_NAME, middle=_VALUES, tail="}", between=", ", close="]"
)
MISTRAL_LIST = replace(MISTRAL, name="mistral_list", signs=(_START,), grammar=_LIST)
