"""Grammars of calls in Lark's syntax, as llguidance reads it.

A marker that is a special token of the tokenizer stands by its id (`<[7]>`), other text as a
string.  Arguments follow the tool's schema (`%json`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.errors import show
from vllm_metal_lite.structured_outputs.json_schema import SchemaError

SpecialTokens = Mapping[str, int]  # ids by text
CallGrammar = Callable[[Sequence[Tool], ToolChoice, SpecialTokens, str], str]
_NO_TOKENS: SpecialTokens = {}
# The spaces that chat templates write.  So the next prompt repeats the model's tokens, and
# separators need no sampling.
SPACES = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}


def literal(text: str, special_tokens: SpecialTokens = _NO_TOKENS) -> str:
    """Text as a terminal of the grammar."""
    if text in special_tokens:
        return f"<[{special_tokens[text]}]>"
    return json.dumps(text, ensure_ascii=False)


def texts(text: str, special_tokens: SpecialTokens) -> str:
    """Text as terminals, in which special tokens stand by their ids; "" for no text."""
    found = [token for token in special_tokens if token in text]
    if not found:
        return literal(text) if text else ""
    pieces = re.split(f"({'|'.join(map(re.escape, sorted(found, key=len, reverse=True)))})", text)
    return " ".join(literal(piece, special_tokens) for piece in pieces if piece)


def text_without(*marks: str) -> str:
    """The body of a terminal, whose name is in capitals, for any text without the marks.

    A model may spell a special token by ordinary ones, and readers see no difference.
    """
    found = "|".join(re.escape(mark).replace("/", r"\/") for mark in marks)
    return f"/(?s:.*)/ & ~/(?s:.*({found}).*)/"


def until(rule: str, mark: str, special: SpecialTokens) -> str:
    """The rule of a text that ends with its first mark."""
    if mark in special:
        name = rule.upper()
        return f"{rule}: {name} {literal(mark, special)}\n{name}: {text_without(mark)}"
    return f"{rule}[suffix={literal(mark)}]: /(?s:.*)/"


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments: an object."""
    return {"type": "object", **tool.held, **SPACES}


# Makes the rule of a tool's call, and adds the rules that it needs to the lines.
Rule = Callable[[Tool, SpecialTokens, list[str]], str]


def bare_names(without: str = "") -> str:
    """Return a regex for names that `Reader.name` reads.  without: characters that none has."""
    return rf"(?!\s)[^<\n{re.escape(without)}]+(?<!\s)"


def named_by(names: str, tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """The tools that a choice allows and whose names the format's reader can read.

    names: a pattern that such names match.  Raises SchemaError if none is left.
    """
    allowed = [tool for tool in tools if choice.name in (None, tool.name)]
    found = [tool for tool in allowed if re.fullmatch(names, tool.name)]
    if allowed and not found:
        raise SchemaError(f": {show(allowed[0].name)}", "calls of this format cannot name it")
    return found


def calls_grammar(
    rule: Rule,
    names: str = "(?s:.+)",
    *,
    start: str,
    between: str = "",
    opening: str = "",
    close: str = "",
    bare: str = "",
) -> CallGrammar:
    """names: see `named_by`.  start: the text before each call; with `close`, the text before the
    first call, followed by `opening`.  close: the text after the last call.  between: the text
    between calls.  In mode "auto" the answer may have text, with or without calls, and `bare`
    instead of start and opening.
    """

    def grammar(
        tools: Sequence[Tool], choice: ToolChoice, special: SpecialTokens, final: str
    ) -> str:
        lines: list[str] = []
        rules = [rule(tool, special, lines) for tool in named_by(names, tools, choice)]
        lines.append(f"call: {' | '.join(f'call_{i}' for i in range(len(rules)))}")
        lines += [f"call_{i}: {rule}" for i, rule in enumerate(rules)]
        space = f"{json.dumps(between)} " if between else ""
        more = f"({space}call)*" if close and choice.parallel else ""
        lines.append(f"block: head call {more} {texts(close, special)}")
        head = f"head: begin {texts(opening, special)}"
        if choice.mode != "auto" or final:
            more = f"({space}block)*" if not close and choice.parallel else ""
            more += f" | {final}" if final else ""
            first = [f"start: block {more}", f"begin: {literal(start, special)}"]
        else:  # a call follows each marker, as the reader knows them
            head += " | bare" * bool(bare)
            if not start:  # a call is the whole answer
                first = ["start: block | TEXT", r"TEXT: /[ \t\r\n]*([^{ \t\r\n](?s:.*))?/"]
                first += ["begin: SPACE?", r"SPACE: /[ \t\r\n]+/"]
            else:
                blocks = "block* TEXT" if choice.parallel else "block | TEXT"
                first = [f"start: {blocks}", "TEXT: /(?s:.*)/"]
            for name, mark in ("begin", start), ("bare", bare):
                if mark:  # a text holds no special token, only its letters
                    by_id = f" | TEXT {literal(mark, special)}" if mark in special else ""
                    first.append(f"{name}: {name}_text{by_id}")
                    first.append(f"{name}_text[lazy]: TEXT {literal(mark)}")
        return "\n".join([*first, head, *lines])

    return grammar


def json_calls(
    *,
    start: str,
    head: str,
    middle: str,
    tail: str = "",
    quoted: bool = True,
    without: str = "",
    **around: str,
) -> CallGrammar:
    """The grammar of calls with JSON arguments: start head NAME middle ARGUMENTS tail.

    quoted: the name is a JSON string; else, it has none of the characters `without`.
    around: see `calls_grammar`.
    """

    def rule(tool: Tool, special: SpecialTokens, lines: list[str]) -> str:
        name, arguments = json.dumps(tool.name) if quoted else tool.name, f"args_{len(lines)}"
        lines.append(f"{arguments}: %json {json.dumps(schema_of(tool))}")
        return f"{texts(f'{head}{name}{middle}', special)} {arguments} {texts(tail, special)}"

    names = "(?s:.*)" if quoted else bare_names(without)
    return calls_grammar(rule, names, start=start, **around)
