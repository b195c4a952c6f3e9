"""Kimi K3: an answer of tags `think`, `response` and `tools`; each argument names its type.

    thoughts<|close|>think<|sep|><|open|>response<|sep|>text<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>
    <|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

The arguments may be one tag `json` instead.
"""

import re

from vllm_metal_lite.chat_formats.calls import CallWriter, json_arguments
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.typed import Tags, read_call

_OPEN, _CLOSE, _SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _opened(tag: str) -> str:
    return f"{_OPEN}{tag}{_SEPARATOR}"


def _closed(tag: str) -> str:
    return f"{_CLOSE}{tag}{_SEPARATOR}"


_OUTER = _closed("tools"), f"{_OPEN}call"
_NAMED = f'{_OPEN}argument key="{{}}"'
_TAGS = Tags(_closed("argument"), f"{_OPEN}argument", _NAMED, _closed("call"), _OUTER)


def _read(reader: Reader, calls: CallWriter, marker: str) -> Reading[None]:
    ends = _closed("call"), _closed("tools")
    return calls.section(lambda: _call(reader, calls), f"{_OPEN}call", *ends)


def _call(reader: Reader, calls: CallWriter) -> Reading[None]:
    tool = calls.begin((yield from _attributes(reader)).get("tool"))
    if (yield from reader.has(f"{_OPEN}json")):
        yield from reader.until(_SEPARATOR)
        yield from json_arguments(reader, calls.arguments)
        yield from reader.expect(_closed("json"))
        yield from reader.expect(_closed("call"))
        calls.end()
        return
    yield from read_call(reader, calls, tool, _TAGS, _key)


def _key(reader: Reader) -> Reading[tuple[str, bool]]:
    attributes = yield from _attributes(reader)
    if not (key := attributes.get("key")):
        raise Malformed
    return key, attributes.get("type", "string") == "string"


def _attributes(reader: Reader) -> Reading[dict[str, str]]:
    text = yield from reader.until(_SEPARATOR)
    found = _ATTRIBUTE.findall(text)
    if _ATTRIBUTE.sub("", text).strip():
        raise Malformed  # the end of the tag is forgotten
    return {k: v.replace("&quot;", '"').replace("&amp;", "&") for k, v in found}


KIMI_K3 = ChatFormat(
    "kimi_k3",
    (_opened("tools"),),
    (_closed("tools"),),
    _read,
    think_start=_opened("think"),
    think_end=_closed("think"),
    dropped=(_opened("response"), _closed("response"), _closed("message")),
)
