"""`<invoke name="...">` with parameters: MiniMax M2, and DeepSeek V3.2 and V4 (DSML).

DSML says of each parameter whether it is a string; MiniMax leaves that to the tool's schema.
"""

import re

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import parameter_calls
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.typed import Tags, read_call

_NAME = re.compile(r'\s*name="([^"]*)"\s*(?:string="(true|false)"\s*)?$')


def _format(name: str, prefix: str, section: str) -> ChatFormat:
    """prefix: of tags within the section."""
    start, end = f"<{section}>", f"</{section}>"
    invoke, invoke_end = f"<{prefix}invoke", f"</{prefix}invoke>"
    parameter, parameter_end = f"<{prefix}parameter", f"</{prefix}parameter>"
    opened = f'{parameter} name="{{}}"'
    tags = Tags(parameter_end, parameter, opened, invoke_end, (end, invoke))

    def read(reader: Reader, calls: CallWriter, marker: str) -> Reading[None]:
        return calls.section(lambda: call(reader, calls), invoke, invoke_end, end)

    def call(reader: Reader, calls: CallWriter) -> Reading[None]:
        tool = calls.begin((yield from _attributes(reader))[0])
        yield from read_call(reader, calls, tool, tags, _attributes)

    grammar = parameter_calls(
        start=start,
        opening="\n",
        head=f'{invoke} name="{{}}">\n',
        tail=f"{invoke_end}\n",
        parameter=opened + (' string="{}">' if prefix else ">"),
        parameter_end=f"{parameter_end}\n",
        close=end,
    )
    return ChatFormat(name, (start,), (end,), read, grammar)


def _attributes(reader: Reader) -> Reading[tuple[str, bool | None]]:
    """The name, and whether the value is a string, if that is said."""
    text, _ = yield from reader.name(">")
    found = _NAME.match(text)
    if found is None or not found[1]:
        raise Malformed
    return found[1], found[2] == "true" if found[2] else None


MINIMAX_M2 = _format("minimax_m2", "", "minimax:tool_call")
DEEPSEEK_V3_2 = _format("deepseek_v32", "｜DSML｜", "｜DSML｜function_calls")
DEEPSEEK_V4 = _format("deepseek_v4", "｜DSML｜", "｜DSML｜tool_calls")
