"""GLM 4.5 and later: `<tool_call>NAME`, then pairs of `<arg_key>` and `<arg_value>`.

Since GLM 4.7 without line breaks.  Ling and Ring write the same; LongCat 2 with names of its own.
"""

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import parameter_calls
from vllm_metal_lite.chat_formats.reader import Reader, Reading
from vllm_metal_lite.chat_formats.typed import Tags, read_typed


def _format(name: str, line_break: str, prefix: str = "") -> ChatFormat:
    """prefix: of the names of all markers."""
    start, end = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    key_start, key_end = f"<{prefix}arg_key>", f"</{prefix}arg_key>"
    value_start, value_end = f"<{prefix}arg_value>", f"</{prefix}arg_value>"
    tags = Tags(value_end, key_start, f"{key_start}{{}}{key_end}", end)

    def read(reader: Reader, calls: CallWriter, marker: str) -> Reading[None]:
        name, found = yield from reader.name(key_start, end)
        tool = calls.begin(name)
        more = found == key_start
        while more:
            key, found = yield from reader.name(key_end, value_start)
            if found == key_end:  # models forget one of the two
                yield from reader.has(value_start)
            yield from read_typed(reader, calls, tool, key, tags)
            more = yield from reader.has(key_start)
        if calls.names:
            yield from reader.expect(end)
        calls.end()

    grammar = parameter_calls(
        start=start,
        head=f"{{}}{line_break}",
        tail=end,
        parameter=f"{key_start}{{}}{key_end}{line_break}{value_start}",
        parameter_end=f"{value_end}{line_break}",
        between="\n",
    )
    thoughts = f"<{prefix}think>", f"</{prefix}think>"
    return ChatFormat(name, (start,), (end,), read, grammar, *thoughts)


GLM_4_5 = _format("glm45", "\n")
GLM_4_7 = _format("glm47", "")
LONGCAT_2 = _format("longcat2", "\n", "longcat_")
