"""Grammars of calls in Lark's syntax, as llguidance reads it.

A marker that is a special token of the tokenizer stands by its id (`<[7]>`), other text as a
string.  Arguments follow the tool's schema (`%json`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_metal_lite.chat_formats.schema import Resolver, listed, properties_of, types_of, values_of
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice

SpecialTokens = Mapping[str, int]  # ids by text
CallGrammar = Callable[[Sequence[Tool], ToolChoice, SpecialTokens, str], str]
_NO_TOKENS: SpecialTokens = {}
# The spaces that chat templates write.  So the next prompt repeats the model's tokens, and
# separators need no sampling.
_SPACES = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}


def marks_of(tokenizer: Any) -> dict[str, int]:
    """Ids by text of the tokens that a grammar must name by id.  For llguidance a special token is
    not text; nor is an added token in angle brackets, such as Qwen's `<tool_call>`."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        token.content: i
        for i, token in added.items()
        if token.special or token.content[:1] + token.content[-1:] == "<>"
    }


def literal(text: str, special_tokens: SpecialTokens = _NO_TOKENS) -> str:
    """Text as a terminal of the grammar."""
    if text in special_tokens:
        return f"<[{special_tokens[text]}]>"
    return json.dumps(text, ensure_ascii=False)


def texts(text: str, special_tokens: SpecialTokens) -> str:
    """Text as terminals, with special tokens in it by their ids; none for no text."""
    found = [token for token in special_tokens if token in text]
    if not found:
        return literal(text) if text else ""
    pieces = re.split(f"({'|'.join(map(re.escape, sorted(found, key=len, reverse=True)))})", text)
    return " ".join(literal(piece, special_tokens) for piece in pieces if piece)


def text_without(*marks: str) -> str:
    """Any text but the marks: a model may spell a special token by ordinary ones, and readers see
    no difference.  As the body of a terminal, whose name is in capitals."""
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
    return {"type": "object", **tool.parameters, **_SPACES}


# The rule of a tool's call; the rules that it needs join the lines.
Rule = Callable[[Tool, SpecialTokens, list[str]], str]


def calls_grammar(
    rule: Rule, *, start: str, between: str = "", opening: str = "", close: str = "", bare: str = ""
) -> CallGrammar:
    """start: the text before each call; with `close`, the text before the first call, followed by
    `opening`.  close: the text after the last call.  between: the text between calls.  In mode
    "auto" the answer may have text, with or without calls, and `bare` instead of start and opening.
    """

    def grammar(
        tools: Sequence[Tool], choice: ToolChoice, special: SpecialTokens, final: str
    ) -> str:
        lines: list[str] = []
        rules = [rule(tool, special, lines) for tool in tools if choice.name in (None, tool.name)]
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
                if mark:  # no text holds a special token, but its letters
                    by_id = f" | TEXT {literal(mark, special)}" if mark in special else ""
                    first.append(f"{name}: {name}_text{by_id}")
                    first.append(f"{name}_text[lazy]: TEXT {literal(mark)}")
        return "\n".join([*first, head, *lines])

    return grammar


def json_calls(
    *, start: str, head: str, middle: str, tail: str = "", quoted: bool = True, **around: str
) -> CallGrammar:
    """Calls with JSON arguments: start head NAME middle ARGUMENTS tail.

    quoted: the name is a JSON string.  around: see `calls_grammar`.
    """

    def rule(tool: Tool, special: SpecialTokens, lines: list[str]) -> str:
        name, arguments = json.dumps(tool.name) if quoted else tool.name, f"args_{len(lines)}"
        lines.append(f"{arguments}: %json {json.dumps(schema_of(tool))}")
        return f"{texts(f'{head}{name}{middle}', special)} {arguments} {texts(tail, special)}"

    return calls_grammar(rule, start=start, **around)


def parameter_calls(
    *, start: str, head: str, tail: str, parameter: str, parameter_end: str, **around: str
) -> CallGrammar:
    """Calls with a parameter for each argument, in the order of the schema.

    head and parameter have {} for a name; parameter may have a second one, for whether the value is
    a string.  A string ends at the mark in `parameter_end`, as readers read it.  Other values are
    JSON.  around: see `calls_grammar`.
    """
    end_mark = parameter_end.strip()
    line_break = parameter_end[parameter_end.index(end_mark) + len(end_mark) :]

    def rule(tool: Tool, special: SpecialTokens, lines: list[str]) -> str:
        resolve = Resolver(tool.parameters)

        def call(whole: Mapping[str, Any]) -> str:
            required = listed(whole, "required")
            parts = [texts(head.format(tool.name), special)]
            for name, schema in properties_of(whole).items():
                alternatives = resolve(schema)
                values, types = values_of(alternatives), types_of(alternatives)
                # Strings are written without quotes, so a value that may be a string is free text.
                is_text = not values and (not types or "string" in types)
                is_string = is_text or types == {"string"}
                pair, value = f"p_{len(lines)}", f"v_{len(lines)}"
                parts.append(pair if name in required else f"{pair}?")
                before = texts(parameter.format(name, str(is_string).lower()), special)
                after = texts(parameter_end, special)
                if values:
                    bare = [literal(v if isinstance(v, str) else json.dumps(v)) for v in values]
                    lines.append(f"{value}: {' | '.join(bare)}")
                elif not is_text:
                    json_schema = {**resolve.standalone(schema), **_SPACES}
                    lines.append(f"{value}: %json {json.dumps(json_schema)}")
                else:
                    lines.append(until(value, end_mark, special))
                    after = texts(line_break, special)
                lines.append(f"{pair}: {before} {value} {after}")
            return " ".join([*parts, texts(tail, special)])

        return " | ".join(map(call, tool.arguments))

    return calls_grammar(rule, start=start, **around)
