"""Kimi K3: an answer of tags `think`, `response` and `tools`; each argument names its type.

    thoughts<|close|>think<|sep|><|open|>response<|sep|>text<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>
    <|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

The arguments may be one tag `json` instead.
"""

import re

from vllm_metal_lite.chat_formats.calls import CallWriter, ObjectWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.typed import read_typed

_OPEN, _CLOSE, _SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def _opened(tag: str) -> str:
    return f"{_OPEN}{tag}{_SEPARATOR}"


def _closed(tag: str) -> str:
    return f"{_CLOSE}{tag}{_SEPARATOR}"


def _read(reader: Reader, calls: CallWriter, marker: str) -> Reading[None]:
    yield from reader.expect(f"{_OPEN}call")
    more = True
    while more:
        calls.begin((yield from _attributes(reader)).get("tool"))
        yield from reader.skip_space()
        if (yield from reader.has(f"{_OPEN}json")):
            yield from reader.until(_SEPARATOR)
            yield from reader.json_value(calls.arguments)
            yield from reader.expect(_closed("json"))
            yield from reader.expect(_closed("call"))
            calls.end()
        else:
            yield from _arguments(reader, ObjectWriter(calls))
        more = yield from reader.another(f"{_OPEN}call", _closed("tools"))


def _arguments(reader: Reader, arguments: ObjectWriter) -> Reading[None]:
    """One tag for each, and the end of the call."""
    while not (yield from reader.has(_closed("call"))):
        yield from reader.expect(f"{_OPEN}argument")
        attributes = yield from _attributes(reader)
        if not (key := attributes.get("key")):
            raise Malformed
        arguments.key(key)
        is_string = attributes.get("type", "string") == "string"
        schema = {"type": "string"} if is_string else {}
        yield from read_typed(reader, arguments, schema, _closed("argument"), newlines=False)
        yield from reader.skip_space()
    arguments.end()


def _attributes(reader: Reader) -> Reading[dict[str, str]]:
    text = yield from reader.until(_SEPARATOR)
    found = _ATTRIBUTE.findall(text)
    return {k: v.replace("&quot;", '"').replace("&amp;", "&") for k, v in found}


KIMI_K3 = ChatFormat(
    "kimi_k3",
    call_starts=(_opened("tools"),),
    call_ends=(_closed("tools"),),
    read_calls=_read,
    think_start=_opened("think"),
    think_end=_closed("think"),
    dropped=(_opened("response"), _closed("response"), _closed("message")),
)
