"""Gemma 4 and FunctionGemma: `call:NAME{key:value}`, with strings between marks of their own."""

from typing import Any

from vllm_metal_lite.chat_formats.calls import CallWriter, ObjectWriter
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.gemma_grammar import gemma_calls
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading
from vllm_metal_lite.chat_formats.typed import value_of


class _Values:
    """Reads values.  quote: stands before and behind a string; models also write other quotes."""

    def __init__(self, quote: str) -> None:
        self.quote = quote

    def read(self, reader: Reader, schema: Any) -> Reading[object]:
        first = yield from reader.peek()
        if first == '"':
            return (yield from reader.json())
        if quote := (yield from self._quote(reader)):
            return (yield from reader.until(quote))
        if first == "{":
            return (yield from self._object(reader))
        if first == "[":
            return (yield from self._list(reader))
        parts: list[str] = []
        yield from reader.before([",", "}", "]"], parts.append)
        text = "".join(parts).strip()
        if self.quote in text or '"' in text:
            raise Malformed
        return value_of(text, schema)

    def key(self, reader: Reader) -> Reading[str]:
        yield from reader.skip_space()
        if quote := (yield from self._quote(reader)):
            key = yield from reader.until(quote)
            yield from reader.expect(":")
            return key
        key, end = yield from reader.name(":", ",", "}")
        if end != ":":
            raise Malformed
        return key

    def _quote(self, reader: Reader) -> Reading[str]:
        for quote in (self.quote, '"', "'"):
            if (yield from reader.has(quote)):
                return quote
        return ""

    def _object(self, reader: Reader) -> Reading[object]:
        reader.take(1)
        value: dict[str, object] = {}
        while (yield from reader.peek()) != "}":
            key = yield from self.key(reader)
            value[key] = yield from self.read(reader, {})
            yield from comma(reader, "}")
        reader.take(1)
        return value

    def _list(self, reader: Reader) -> Reading[object]:
        reader.take(1)
        value: list[object] = []
        while (yield from reader.peek()) != "]":
            value.append((yield from self.read(reader, {})))
            yield from comma(reader, "]")
        reader.take(1)
        return value


def comma(reader: Reader, end: str) -> Reading[None]:
    """Read a comma, unless `end` comes."""
    if (yield from reader.peek()) == ",":
        reader.take(1)
    elif reader.rest[:1] != end:
        yield from reader.expect(end)


def _format(
    name: str, start: str, end: str, quote: str, think_start: str | None, think_end: str | None
) -> ChatFormat:
    values = _Values(quote)

    def read(reader: Reader, calls: CallWriter, marker: str) -> Reading[None]:
        yield from reader.expect("call:")
        tool_name, _ = yield from reader.name("{")
        tool = calls.begin(tool_name)
        arguments = ObjectWriter(calls)
        while (yield from reader.peek()) != "}":
            key = yield from values.key(reader)
            arguments.key(key)
            yield from reader.skip_space()
            if (yield from reader.has(quote)):
                arguments.string_start()
                yield from reader.before([quote], arguments.string_piece)
                reader.take(len(quote))
                arguments.string_end()
            else:
                schema = tool.properties.get(key, {})
                arguments.value((yield from values.read(reader, schema)))
            yield from comma(reader, "}")
        reader.take(1)
        arguments.end()
        yield from reader.skip_space()
        yield from reader.has(end)  # a model may end its answer without

    return ChatFormat(
        name,
        call_starts=(start,),
        call_ends=(end,),
        read_calls=read,
        think_start=think_start,
        think_end=think_end,
        grammar=gemma_calls(start, end, quote),
    )


GEMMA_4 = _format(
    "gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>thought", "<channel|>"
)
FUNCTION_GEMMA = _format(
    "function_gemma", "<start_function_call>", "<end_function_call>", "<escape>", None, None
)
