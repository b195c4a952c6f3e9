"""Qwen's XML: `<function=NAME>` with a `<parameter=NAME>` for each argument.

Qwen3-Coder, Qwen3-Next Coder, Qwen3.5, Nemotron 3, and others; Seed-OSS, with markers of its own.
"""

from functools import partial

from vllm_metal_lite.chat_formats.calls import CallWriter, ObjectWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import parameter_calls
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.typed import Tags, read_typed

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def _read(reader: Reader, calls: CallWriter, marker: str, *, start: str, end: str) -> Reading[None]:
    if marker == start:
        yield from reader.expect(_FUNCTION)
    tags = Tags(_PARAMETER_END, _PARAMETER, f"{_PARAMETER}{{}}>", _FUNCTION_END, (end,))
    yield from calls.guard(_call(reader, calls, tags), (_FUNCTION_END, end))
    yield from reader.skip_space()
    yield from reader.has(end)


def _call(reader: Reader, calls: CallWriter, tags: Tags) -> Reading[None]:
    name, _ = yield from reader.name(">")
    tool = calls.begin(name)
    arguments = ObjectWriter(calls)
    yield from reader.skip_space()
    while (yield from reader.has(_PARAMETER)):
        name, _ = yield from reader.name(">")
        yield from read_typed(reader, arguments, tool, name, tags, newlines=True)
        yield from reader.skip_space()
    if not (yield from reader.has(_FUNCTION_END)) and not (yield from reader.follows(tags.outer)):
        raise Malformed
    arguments.end()


def _format(name: str, prefix: str) -> ChatFormat:
    """prefix: of the names of the outer markers."""
    start, end = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    return ChatFormat(
        name,
        # Models forget the outer marker at times.
        call_starts=(start, _FUNCTION),
        call_ends=(end,),
        read_calls=partial(_read, start=start, end=end),
        think_start=f"<{prefix}think>",
        think_end=f"</{prefix}think>",
        grammar=parameter_calls(
            start=start, end=end, head="\n<function={}>\n", tail="</function>\n",
            parameter="<parameter={}>\n", parameter_end="\n</parameter>\n", between="\n",
        ),
    )  # fmt: skip


QWEN_XML = _format("qwen3_coder", "")
SEED_OSS = _format("seed_oss", "seed:")
