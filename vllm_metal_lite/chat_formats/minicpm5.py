"""MiniCPM 5: `<function name="NAME">` with a `<param name="KEY">` for each argument.

Strings with special characters stand between `<![CDATA[` and `]]>`.
"""

import re

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import parameter_calls
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.typed import Tags, read_typed

_START, _END = "<function name=", "</function>"
_PARAMETER, _PARAMETER_END = "<param name=", "</param>"
_RAW, _RAW_END = "<![CDATA[", "]]>"
_TAGS = Tags(_PARAMETER_END, _PARAMETER, f'{_PARAMETER}"{{}}">', _END)
_RAW_TAGS = Tags(_RAW_END, close=_PARAMETER_END)
_NAME = re.compile(r"""\s*(?:"([^"]+)"|'([^']+)'|([^\s"'<>]+))\s*$""")


def _read(reader: Reader, calls: CallWriter, marker: str) -> Reading[None]:
    tool = calls.begin((yield from _name(reader)))
    while not (yield from reader.has(_END)):
        yield from reader.expect(_PARAMETER)
        key = yield from _name(reader)
        is_raw = yield from reader.begins(_RAW)
        yield from read_typed(reader, calls, tool, key, _RAW_TAGS if is_raw else _TAGS)
        if is_raw:
            yield from reader.expect(_PARAMETER_END)
    calls.end()


def _name(reader: Reader) -> Reading[str]:
    text, _ = yield from reader.name(">")
    if (found := _NAME.match(text)) is None:
        raise Malformed
    return next(group for group in found.groups() if group)


MINICPM_5 = ChatFormat(
    "minicpm5",
    (_START,),
    (_END,),
    _read,
    parameter_calls(
        start=f'{_START}"',
        head='{}">',
        tail=_END,
        parameter=f'{_PARAMETER}"{{}}">',
        parameter_end=_PARAMETER_END,
    ),
)
