"""`<invoke name="...">` with parameters: MiniMax M2, and DeepSeek V3.2 and V4 (DSML).

DSML says of each parameter whether it is a string; MiniMax leaves that to the tool's schema.
"""

import re

from vllm_metal_lite.chat_formats.calls import CallWriter, ObjectWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import parameter_calls
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.typed import Tags, read_typed

_NAME = re.compile(r'\s*name="([^"]*)"\s*(?:string="(true|false)"\s*)?$')


def _format(name: str, prefix: str, section: str) -> ChatFormat:
    """prefix: of tags within the section."""
    start, end = f"<{section}>", f"</{section}>"
    invoke, invoke_end = f"<{prefix}invoke", f"</{prefix}invoke>"
    parameter, parameter_end = f"<{prefix}parameter", f"</{prefix}parameter>"
    opened = f'{parameter} name="{{}}"'
    tags = Tags(parameter_end, parameter, opened, invoke_end, (end, invoke))

    def read(reader: Reader, calls: CallWriter, marker: str) -> Reading[None]:
        yield from calls.section(lambda: call(reader, calls), invoke, invoke_end, end)

    def call(reader: Reader, calls: CallWriter) -> Reading[None]:
        tool_name, _ = yield from _attributes(reader)
        tool = calls.begin(tool_name)
        arguments = ObjectWriter(calls)
        yield from reader.skip_space()
        while (yield from reader.has(parameter)):
            key, is_string = yield from _attributes(reader)
            schema = tool.properties.get(key)
            if is_string is not None:
                schema = {"type": "string"} if is_string == "true" else {}
            yield from read_typed(reader, arguments, tool, key, tags, schema=schema)
            yield from reader.skip_space()
        if not (yield from reader.has(invoke_end)) and not (yield from reader.follows(tags.outer)):
            raise Malformed
        arguments.end()

    return ChatFormat(
        name,
        call_starts=(start,),
        call_ends=(end,),
        read_calls=read,
        think_start="<think>",
        think_end="</think>",
        grammar=parameter_calls(
            start=start, opening="\n", head=f'{invoke} name="{{}}">\n', end=f"{invoke_end}\n",
            parameter=opened + (' string="{}">' if prefix else ">"),
            parameter_end=f"{parameter_end}\n", between="", close=end,
        ),
    )  # fmt: skip


def _attributes(reader: Reader) -> Reading[tuple[str, str | None]]:
    """The name, and whether the value is a string, if that is said."""
    text, _ = yield from reader.name(">")
    found = _NAME.match(text)
    if found is None or not found[1]:
        raise Malformed
    return found[1], found[2]


MINIMAX_M2 = _format("minimax_m2", "", "minimax:tool_call")
DEEPSEEK_V3_2 = _format("deepseek_v32", "｜DSML｜", "｜DSML｜function_calls")
DEEPSEEK_V4 = _format("deepseek_v4", "｜DSML｜", "｜DSML｜tool_calls")
