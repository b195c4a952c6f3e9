"""Arguments that a format writes as plain text; their types are those of the tool's schema."""

import ast
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from warnings import catch_warnings

from vllm_metal_lite.chat_formats.calls import CallWriter
from vllm_metal_lite.chat_formats.reader import Malformed, Reader, Reading, loads_or
from vllm_metal_lite.chat_formats.schema import JSON_TYPES
from vllm_metal_lite.chat_formats.tool import Tool

_JSON_START = re.compile(r"\s*[{\[](?!\s*')")  # Python's strings may have other quotes
_NO_JSON = object()
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


@dataclass(frozen=True)
class Tags:
    """Tags around values.

    end: the tag after a value.  tag_start: the start of every argument's tag.  tag: that tag, with
    {} for the argument's name.  close: ends the call.  outer: any of them may follow `close`.
    newlines: the format adds a line break before and after a string.
    """

    end: str
    tag_start: str = ""
    tag: str = ""
    close: str = ""
    outer: tuple[str, ...] = ()
    newlines: bool = False

    @property
    def stops(self) -> list[str]:
        """Where a value may end."""
        marks = {mark for mark in (self.end, self.tag_start, self.close) if mark}
        return sorted(m for m in marks if not any(m.startswith(o) for o in marks - {m}))


def read_typed(
    reader: Reader,
    calls: CallWriter,
    tool: Tool,
    name: str,
    tags: Tags,
    is_string: bool | None = None,
) -> Reading[None]:
    """Read the argument `name` and its end.  Strings are passed on as they come.

    is_string: None if the tool's schema decides.  Raises Malformed, CutShort.
    """
    calls.key(name)
    types = tool.types.get(name, {"string"})
    if is_string is not None:
        types = {"string"} if is_string else {*JSON_TYPES.values()} - {"string"}
    others = [tags.tag.format(n) for n in tool.types if tags.tag and n not in calls.names]
    value = partial(_value, reader, tags, others, types, is_held=calls.is_held)
    if types != {"string"}:
        text, _ = yield from value(lambda text: None)
        bare = text.removeprefix("\n").removesuffix("\n") if tags.newlines else text
        named = tool.named.get(name, {})
        calls.value(named[bare] if bare in named else value_of(bare, types))
        return
    if tags.newlines:
        yield from reader.begins("\n")
    held = ""  # a line break that may be the last

    def pass_on(text: str) -> None:
        nonlocal held
        text, held = held + text, ""
        if text.endswith("\n"):
            text, held = text[:-1], "\n"
        if text:
            calls.string_piece(text)

    calls.quote()
    _, has_end = yield from value(pass_on)
    if has_end and not tags.newlines:
        calls.string_piece(held)
    calls.quote()


def _value(
    reader: Reader,
    tags: Tags,
    others: Sequence[str],
    types: Collection[str],
    pass_on: Callable[[str], None],
    *,
    is_held: bool,
) -> Reading[tuple[str, bool]]:
    """Read the text of a value; also returns whether its end was written.

    If the end is forgotten, the value ends at the tag of a further argument (`others`), or at the
    end of the call if the value is JSON or a tag of `outer` follows.  is_held: the value ends at
    the first end that no string of JSON holds, as in the grammar.
    """
    parts: list[str] = []

    def keep(text: str) -> None:
        parts.append(text)
        pass_on(text)

    is_json, has_quotes = types != {"string"}, len(types) > 0 and "string" not in types
    is_raw = not tags.tag_start
    stops = [tags.end] if is_held and not is_raw else tags.stops
    while True:
        stop = yield from reader.before(stops, keep)
        if has_quotes and _ends_in_string("".join(parts)):
            keep(reader.take(1))
            continue
        follower = tags.close if is_raw and stop == tags.end else ""
        if is_held and (yield from reader.follows([follower], len(stop))) is not None:
            reader.take(len(stop) * (stop == tags.end))
            return "".join(parts), True
        found = yield from reader.follows([tags.end, *others, *filter(None, [tags.close])])
        text = "".join(parts)
        is_complete = is_json and found is not None and _is_json(text)
        if found == tags.end:
            ends, is_last = yield from _ends(reader, tags)
            count = ends.count(tags.end)
            if not is_last:
                found = ends
            if not is_last or (count > 1 and _is_open(text, tags.end)):
                count = int(is_complete)
            for _ in range(count):  # some models double them
                yield from reader.expect(tags.end)
            if count:
                return text, True
        elif found is not None:
            end_is_missing = found in others or is_complete
            if tags.outer and not end_is_missing:
                end_is_missing = (yield from reader.follows(tags.outer, len(found))) is not None
            if end_is_missing:
                if any(end in text for end in (tags.end, tags.close, *tags.outer) if end):
                    raise Malformed  # the value ended before
                return text, False
        keep(reader.take(len(found or " ")))  # it is text


def _ends(reader: Reader, tags: Tags) -> Reading[tuple[str, bool]]:
    """The ends in a row, and whether another argument or the end of the call follows them.  If not,
    the ends are part of the value."""
    length, marks = 0, list(filter(None, (tags.end, tags.tag_start, tags.close, *tags.outer)))
    while (found := (yield from reader.follows(marks, length))) == tags.end:
        length = reader.rest.index(found, length) + len(found)
    return reader.rest[:length], found is not None


def _is_open(text: str, end: str) -> bool:
    """Whether a tag that `end` closes is open at the end of a text."""
    return text.count(end.replace("</", "<", 1).rstrip(">")) > text.count(end)


def _ends_in_string(text: str) -> bool:
    """Whether a text is the beginning of a JSON object or list, and ends within a string."""
    return _JSON_START.match(text) is not None and '"' in _STRING.sub("", text)


def _is_json(text: str) -> bool:
    return loads_or(_NO_JSON, text.strip()) is not _NO_JSON


def value_of(text: str, types: Collection[str]) -> Any:
    """A value of one of `types` (none: of any); text that does not fit stays a string."""
    value = loads_or(_NO_JSON, text.strip())
    if value is _NO_JSON:
        value = _of_python(text.strip(), text)
    kind = JSON_TYPES[type(value)]
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    if fits and kind != "string":
        return value
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return int(value)
    return text  # a string is as written


def _of_python(text: str, default: str) -> Any:
    """A list, a dict or a constant as Python writes it."""
    if text not in CONSTANTS and text[:1] not in ("{", "["):
        return default
    try:
        return python_value(text)
    except Malformed:
        return default


_JSON_NAMES = {"true": True, "false": False, "null": None}
CONSTANTS = "True", "False", "None", *_JSON_NAMES


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def python_value(text: str) -> Any:
    """The value of a Python literal with a JSON form, or of a JSON constant.  Raises Malformed."""
    try:
        with catch_warnings(action="ignore"):  # escapes that Python does not know cause warnings
            tree = ast.parse(text, mode="eval")
        value = ast.literal_eval(_JsonNames().visit(tree))
        return json.loads(json.dumps(value, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None
