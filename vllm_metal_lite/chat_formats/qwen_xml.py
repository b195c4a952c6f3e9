"""Qwen's XML: `<function=NAME>` with a `<parameter=NAME>` for each argument.

Qwen3-Coder, Qwen3-Next Coder, Qwen3.5, Nemotron 3, and others; Seed-OSS, with markers of its own.
"""

from functools import partial

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import parameter_calls
from vllm_metal_lite.chat_formats.reader import Reader, Reading
from vllm_metal_lite.chat_formats.typed import Tags, read_call

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def _read(reader: Reader, calls: CallWriter, marker: str, *, start: str, end: str) -> Reading[None]:
    if marker == start:
        yield from reader.expect(_FUNCTION)
    tags = Tags(_PARAMETER_END, _PARAMETER, f"{_PARAMETER}{{}}>", _FUNCTION_END, (end,), True)
    tool = calls.begin((yield from _key(reader))[0])
    yield from calls.guard(read_call(reader, calls, tool, tags, _key), (_FUNCTION_END, end))
    yield from reader.has(end)


def _key(reader: Reader) -> Reading[tuple[str, None]]:
    name, _ = yield from reader.name(">")
    return name, None


def _format(name: str, prefix: str) -> ChatFormat:
    """prefix: of the names of the outer markers."""
    start, end = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    grammar = parameter_calls(
        start=start,
        head="\n<function={}>\n",
        tail=f"</function>\n{end}",
        parameter="<parameter={}>\n",
        parameter_end="\n</parameter>\n",
        between="\n",
    )
    starts = start, _FUNCTION  # models forget the outer marker at times
    read, thoughts = partial(_read, start=start, end=end), (f"<{prefix}think>", f"</{prefix}think>")
    return ChatFormat(name, starts, (end,), read, grammar, *thoughts)


QWEN_XML = _format("qwen3_coder", "")
SEED_OSS = _format("seed_oss", "seed:")
