"""Formats with a tag for each argument.

Qwen3-Coder, Qwen3.5, Nemotron 3 and others    <function=NAME><parameter=KEY>
Seed-OSS                                       the same, with outer markers of its own
GLM, Ling, Ring                                <tool_call>NAME<arg_key>KEY</arg_key><arg_value>
LongCat 2                                      the same, with names of its own
MiniMax M2                                     <invoke name="NAME"><parameter name="KEY">
DeepSeek V3.2 and V4 (DSML)                    the same; each parameter says if it is a string
MiniCPM 5                                      <function name="NAME"><param name="KEY">, with
                                               special characters between <![CDATA[ and ]]>
"""

import re
from functools import partial

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import parameter_calls
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.typed import Tags, read_call, read_typed

# Qwen

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def _read_qwen(reader: Reader, calls: CallWriter, *, start: str, end: str) -> Reading[None]:
    if reader.taken == start:  # the marker that led here
        yield from reader.expect(_FUNCTION)
    tags = Tags(_PARAMETER_END, _PARAMETER, f"{_PARAMETER}{{}}>", _FUNCTION_END, (end,), True)
    tool = calls.begin((yield from _plain_name(reader))[0])
    yield from calls.guard(read_call(reader, calls, tool, tags, _plain_name), (_FUNCTION_END, end))
    yield from reader.has(end)


def _plain_name(reader: Reader) -> Reading[tuple[str, None]]:
    name, _ = yield from reader.name(">")
    return name, None


def _qwen(name: str, prefix: str) -> ChatFormat:
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
    read = partial(_read_qwen, start=start, end=end)
    thoughts = f"<{prefix}think>", f"</{prefix}think>"
    return ChatFormat(name, starts, (end,), read, grammar, *thoughts)


QWEN_XML = _qwen("qwen3_coder", "")
SEED_OSS = _qwen("seed_oss", "seed:")


# GLM


def _glm(name: str, line_break: str, prefix: str = "") -> ChatFormat:
    """prefix: of the names of all markers."""
    start, end = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    key_start, key_end = f"<{prefix}arg_key>", f"</{prefix}arg_key>"
    value_start, value_end = f"<{prefix}arg_value>", f"</{prefix}arg_value>"
    tags = Tags(value_end, key_start, f"{key_start}{{}}{key_end}", end)

    def read(reader: Reader, calls: CallWriter) -> Reading[None]:
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


GLM_4_5 = _glm("glm45", "\n")
GLM_4_7 = _glm("glm47", "")
LONGCAT_2 = _glm("longcat2", "\n", "longcat_")


# MiniMax and DSML

_ATTRIBUTES = re.compile(r'\s*name="([^"]*)"\s*(?:string="(true|false)"\s*)?$')


def _invoke(name: str, prefix: str, section: str) -> ChatFormat:
    """prefix: of tags within the section."""
    start, end = f"<{section}>", f"</{section}>"
    invoke, invoke_end = f"<{prefix}invoke", f"</{prefix}invoke>"
    parameter, parameter_end = f"<{prefix}parameter", f"</{prefix}parameter>"
    opened = f'{parameter} name="{{}}"'
    tags = Tags(parameter_end, parameter, opened, invoke_end, (end, invoke))

    def read(reader: Reader, calls: CallWriter) -> Reading[None]:
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
    found = _ATTRIBUTES.match(text)
    if found is None or not found[1]:
        raise Malformed
    return found[1], found[2] == "true" if found[2] else None


MINIMAX_M2 = _invoke("minimax_m2", "", "minimax:tool_call")
DEEPSEEK_V3_2 = _invoke("deepseek_v32", "｜DSML｜", "｜DSML｜function_calls")
DEEPSEEK_V4 = _invoke("deepseek_v4", "｜DSML｜", "｜DSML｜tool_calls")


# MiniCPM

_CALL = "<function name="
_PARAM, _PARAM_END = "<param name=", "</param>"
_RAW, _RAW_END = "<![CDATA[", "]]>"
_TAGS = Tags(_PARAM_END, _PARAM, f'{_PARAM}"{{}}">', _FUNCTION_END)
_RAW_TAGS = Tags(_RAW_END, close=_PARAM_END)
_NAME = re.compile(r"""\s*(?:"([^"]+)"|'([^']+)'|([^\s"'<>]+))\s*$""")


def _read_minicpm(reader: Reader, calls: CallWriter) -> Reading[None]:
    tool = calls.begin((yield from _quoted_name(reader)))
    while not (yield from reader.has(_FUNCTION_END)):
        yield from reader.expect(_PARAM)
        key = yield from _quoted_name(reader)
        is_raw = yield from reader.begins(_RAW)
        yield from read_typed(reader, calls, tool, key, _RAW_TAGS if is_raw else _TAGS)
        if is_raw:
            yield from reader.expect(_PARAM_END)
    calls.end()


def _quoted_name(reader: Reader) -> Reading[str]:
    text, _ = yield from reader.name(">")
    if (found := _NAME.match(text)) is None:
        raise Malformed
    return next(group for group in found.groups() if group)


MINICPM_5 = ChatFormat(
    "minicpm5",
    (_CALL,),
    (_FUNCTION_END,),
    _read_minicpm,
    parameter_calls(
        start=f'{_CALL}"',
        head='{}">',
        tail=_FUNCTION_END,
        parameter=f'{_PARAM}"{{}}">',
        parameter_end=_PARAM_END,
    ),
)
