"""A section of calls, each a name and then JSON arguments: DeepSeek V3 and R1, Hunyuan, Kimi K2."""

from functools import partial

from vllm_metal_lite.chat_formats.calls import CallWriter, json_arguments
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import json_calls
from vllm_metal_lite.chat_formats.history import Adapt, with_call_ids
from vllm_metal_lite.chat_formats.reader import Reader, Reading

_CODE, _CODE_END = "```json", "```"
_ARGUMENTS = "<|tool_call_argument_begin|>"


def _format(
    name: str,
    signs: tuple[str, ...],
    section: tuple[str, str],
    call: tuple[str, str],
    separator: str,
    *,
    head: str = "",
    tail: str = "",
    adapt: Adapt | None = None,
    **grammar: str,
) -> ChatFormat:
    """section, call: the first and the last marker of each.  separator: the mark after the name.

    head, tail, and the names in `grammar`: see `json_calls`.
    """
    start, end = section
    first, last = call

    def read_one(reader: Reader, calls: CallWriter) -> Reading[None]:
        """A call after its first marker, up to its last one; arguments may be missing."""
        name, found = yield from reader.name(separator, last)
        if not calls.knows(name):  # Kimi's is in the id, `functions.NAME:0`
            name = name.removeprefix("functions.").partition(":")[0]
        calls.begin(name)
        if found != last:
            after = _CODE_END if separator == _CODE else last
            yield from json_arguments(reader, calls.arguments, after)
            if after == _CODE_END:
                yield from reader.expect(after)
            if (yield from reader.follows((first, end))) is None:  # models may forget `last`
                yield from reader.expect(last)
        calls.end()

    def read(reader: Reader, calls: CallWriter) -> Reading[None]:
        return calls.section(lambda: read_one(reader, calls), first, last, end)

    head, tail = f"{first}{head}", f"{tail}{last}"
    demanded = json_calls(start=start, head=head, tail=tail, close=end, quoted=False, **grammar)
    return ChatFormat(name, signs, (start,), (end,), read, demanded, adapt=adapt)


_SEPARATOR = "<｜tool▁sep｜>"
_BEFORE_CODE, _AFTER_CODE = f"\n{_CODE}\n", f"\n{_CODE_END}"
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
# V3 writes the tool's type before its name.
DEEPSEEK_V3 = _format(
    "deepseek_v3",
    (_DEEPSEEK[0], _CODE),
    _DEEPSEEK,
    (f"{_BEGIN}function{_SEPARATOR}", _END),
    _CODE,
    middle=_BEFORE_CODE,
    tail=_AFTER_CODE,
    between="\n",
)
DEEPSEEK_V3_1 = _format(
    "deepseek_v31", _DEEPSEEK[:1], _DEEPSEEK, (_BEGIN, _END), _SEPARATOR, middle=_SEPARATOR
)

_CALLS, _CALL = ("<tool_calls>", "</tool_calls>"), ("<tool_call>", "</tool_call>")
HUNYUAN = _format(
    "hunyuan",
    (*_CALLS, _CALL[0], _CODE),
    _CALLS,
    _CALL,
    _CODE,
    middle=_BEFORE_CODE,
    tail=_AFTER_CODE,
)


def _kimi_id(name: str, number: int, given: str) -> str:
    return f"functions.{name}:{number}"


# The number after the name is that of the call in the conversation; the reader accepts any number.
KIMI_K2 = _format(
    "kimi_k2",
    ("<|tool_calls_section_begin|>", _ARGUMENTS),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    _ARGUMENTS,
    head="functions.",
    middle=f":0{_ARGUMENTS}",
    without=":",
    adapt=partial(with_call_ids, _kimi_id),
)
