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

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.chat_format import THINK, ChatFormat, Thoughts
from vllm_metal_lite.chat_formats.parameter_rules import parameter_calls
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.typed import Tags, read_typed

_NAME = re.compile(
    r"""\s*(?:name=)?(?:"([^"]+)"|'([^']+)'|([^"'=]+?))\s*(?:string="(true|false)"\s*)?$"""
)


def _format(
    name: str,
    signs: tuple[str, ...],
    starts: tuple[str, ...],
    call: tuple[str, str],
    end: str = "",
    *,
    thoughts: Thoughts = THINK,
    newlines: bool = False,
    raw: tuple[str, str] = ("", ""),
    **grammar: str,
) -> ChatFormat:
    """call: the text before a call's name, and the last tag of the call.  end: the tag after all
    calls.  newlines: see `Tags`.  raw: the marks around a value with special characters.
    grammar: see `parameter_calls`."""
    begin, call_end = call
    before_name, _, after_name = grammar["parameter"].partition("{}")
    tags = Tags(
        end=grammar["parameter_end"].strip(),
        close=call_end,
        tag_start=before_name.partition(" ")[0],
        tag=f"{before_name}{{}}{after_name[0]}",
        outer=(end, begin) if end else (),
        newlines=newlines,
    )

    def read_one(reader: Reader, calls: CallWriter) -> Reading[None]:
        tool = calls.begin((yield from _name(reader))[0])
        while (yield from reader.has(tags.tag_start)):
            key, is_string = yield from _name(reader)
            is_raw = raw[0] != "" and (yield from reader.begins(raw[0]))
            around = Tags(raw[1], tags.end) if is_raw else tags
            yield from read_typed(reader, calls, tool, key, around, is_string)
            if is_raw:
                yield from reader.expect(tags.end)
        if (yield from reader.follows(tags.outer)) is None:  # models forget the end before these
            yield from reader.expect(tags.close)
        calls.end()

    def read(reader: Reader, calls: CallWriter) -> Reading[None]:
        return calls.section(lambda: read_one(reader, calls), begin, call_end, end)

    demanded = parameter_calls(**grammar)
    return ChatFormat(name, signs, starts, (end or call_end,), read, demanded, thoughts)


def _name(reader: Reader) -> Reading[tuple[str, bool | None]]:
    """Read the name up to ">", and whether the value is a string, if the tag says so."""
    text, _ = yield from reader.name(">")
    if (found := _NAME.match(text)) is None:
        raise Malformed
    *names, is_string = found.groups()
    return next(filter(None, names)), is_string == "true" if is_string else None


def _qwen(name: str, prefix: str, *signs: str) -> ChatFormat:
    """prefix: starts the name of each outer marker, such as `seed:`.  signs: beside the tags."""
    start, end = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    return _format(
        name,
        (*signs, "<function=", "<parameter="),
        (start, "<function="),  # models forget the outer marker at times
        ("<function=", "</function>"),
        end,
        thoughts=Thoughts(f"<{prefix}think>", f"</{prefix}think>"),
        newlines=True,
        start=start,
        opening="\n<function=",
        bare="<function=",
        head="{}>\n",
        tail=f"</function>\n{end}",
        parameter="<parameter={}>\n",
        without=">\"'=",
        parameter_end="\n</parameter>\n",
        between="\n",
    )


QWEN_XML = _qwen("qwen3_coder", "")
SEED_OSS = _qwen("seed_oss", "seed:", "<seed:tool_call>")


def _glm(name: str, signs: tuple[str, ...], line_break: str, prefix: str = "") -> ChatFormat:
    """prefix: starts each marker's name, such as `longcat_`."""
    start, end = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    key_start, key_end = f"<{prefix}arg_key>", f"</{prefix}arg_key>"
    value_start, value_end = f"<{prefix}arg_value>", f"</{prefix}arg_value>"
    tags = Tags(value_end, end, key_start, f"{key_start}{{}}{key_end}")

    def read(reader: Reader, calls: CallWriter) -> Reading[None]:
        name, found = yield from calls.name(key_start, end)
        tool = calls.begin(name)
        more = found == key_start
        while more:
            key, found = yield from reader.name(key_end, value_start)
            if found == key_end:  # models forget one of the two
                yield from reader.has(value_start)
            yield from read_typed(reader, calls, tool, key, tags, None)
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
    thoughts = Thoughts(f"<{prefix}think>", f"</{prefix}think>")
    return ChatFormat(name, signs, (start,), (end,), read, grammar, thoughts)


GLM_4_5 = _glm("glm45", ("<tool_call>", "<arg_key>"), "\n")
GLM_4_7 = _glm("glm47", ("<tool_call>{function-name}<arg_key>",), "")
LONGCAT_2 = _glm("longcat2", ("<longcat_arg_key>",), "\n", "longcat_")


def _invoke(
    name: str, signs: tuple[str, ...], prefix: str, section: str, string: str = ""
) -> ChatFormat:
    """prefix: starts the name of each inner tag.  string: says whether a parameter is a string."""
    start, end = f"<{section}>", f"</{section}>"
    invoke, invoke_end = f"<{prefix}invoke", f"</{prefix}invoke>"
    return _format(
        name,
        signs,
        (start,),
        (invoke, invoke_end),
        end,
        start=start,
        opening="\n",
        head=f'{invoke} name="{{}}">\n',
        tail=f"{invoke_end}\n",
        parameter=f'<{prefix}parameter name="{{}}"{string}>',
        without='>"',
        parameter_end=f"</{prefix}parameter>\n",
        close=end,
    )


_DSML = "｜DSML｜"
_STRING = ' string="{}"'
MINIMAX_M2 = _invoke(
    "minimax_m2", ("<minimax:tool_call>", "<invoke name="), "", "minimax:tool_call"
)
DEEPSEEK_V3_2 = _invoke(
    "deepseek_v32", (_DSML, "function_calls>"), _DSML, f"{_DSML}function_calls", _STRING
)
DEEPSEEK_V4 = _invoke("deepseek_v4", (_DSML, "tool_calls>"), _DSML, f"{_DSML}tool_calls", _STRING)
MINICPM_5 = _format(
    "minicpm5",
    ("<function name=", "<param name="),
    ("<function name=",),
    ("<function name=", "</function>"),
    raw=("<![CDATA[", "]]>"),
    start="<function name=",
    head='"{}">',
    tail="</function>",
    parameter='<param name="{}">',
    without='>"',
    parameter_end="</param>",
)
