"""Grammars of calls in Lark's syntax, as llguidance reads it.

A marker that is a special token of the tokenizer stands by its id (`<[7]>`), other text as a
string.  Arguments follow the tool's schema (`%json`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_metal_lite.chat_formats.schema import names_of, standalone
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.chat_formats.typed import types_of

SpecialTokens = Mapping[str, int]  # ids by text
CallGrammar = Callable[[Sequence[Tool], ToolChoice, SpecialTokens], str]
_NONE: SpecialTokens = {}
# As chat templates write arguments.  So the next prompt repeats what the model wrote, and
# separators are known without sampling.
_SPACES = {
    "x-guidance": {
        "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "
    }
}  # fmt: skip


def marks_of(tokenizer: Any) -> dict[str, int]:
    """Ids by text of the tokens that a grammar must name by id: llguidance takes special tokens for
    no text, and so all added ones in angle brackets (Qwen's `<tool_call>` is not special)."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        token.content: i
        for i, token in added.items()
        if token.special or token.content[:1] + token.content[-1:] == "<>"
    }


def literal(text: str, special_tokens: SpecialTokens = _NONE) -> str:
    """Text as a terminal of the grammar."""
    if text in special_tokens:
        return f"<[{special_tokens[text]}]>"
    return json.dumps(text, ensure_ascii=False)


def texts(text: str, special_tokens: SpecialTokens) -> list[str]:
    """Text as terminals, with special tokens in it by their names; none for no text."""
    found = [token for token in special_tokens if token in text]
    if not found:
        return [literal(text)] if text else []
    pieces = re.split(f"({'|'.join(map(re.escape, sorted(found, key=len, reverse=True)))})", text)
    return [literal(piece, special_tokens) for piece in pieces if piece]


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments: an object."""
    return {"type": "object", **tool.parameters, **_SPACES}


def answer(
    rules: dict[str, str],
    choice: ToolChoice,
    begin: str,
    between: str,
    opening: str = "",
    close: str = "",
) -> list[str]:
    """The start rule of calls by tool name, and the rules of the tools that `choice` allows.

    rules: of a call, by tool.  begin: stands before each call; with `close`, `begin` and `opening`
    stand before the first, and `close` behind the last.  In mode "auto" text may stand around
    calls, and there need not be any.
    """
    allowed = [rules[choice.name]] if choice.name is not None else list(rules.values())
    lines = [f"call: {' | '.join(f'call_{i}' for i in range(len(allowed)))}"]
    lines += [f"call_{i}: {rule}" for i, rule in enumerate(allowed)]
    space = f"{json.dumps(between)} " if between else ""
    more = f" ({space}call)*" if close and choice.parallel else ""
    lines.append(f"block: begin {opening} call{more} {close}")
    if choice.mode != "auto":
        more = f" ({space}block)*" if not close and choice.parallel else ""
        return [f"start: block{more}", f"begin: {begin}", *lines]
    first = "block* TEXT" if choice.parallel else "block | TEXT"
    if begin == '""':  # a call is the whole answer
        return ["start: block | TEXT", "TEXT: /([^{](?s:.*))?/", f"begin: {begin}", *lines]
    # No text holds a special token; text before another marker ends with the marker.
    head = "begin[lazy]" if begin.startswith('"') else "begin"
    return [f"start: {first}", "TEXT: /(?s:.*)/", f"{head}: TEXT {begin}", *lines]


def json_calls(
    *,
    start: str,
    end: str = "",
    head: str,
    middle: str,
    tail: str = "",
    between: str = "",
    opening: str = "",
    close: str = "",
    quoted: bool = True,
) -> CallGrammar:
    """Calls with JSON arguments: start head NAME middle ARGUMENTS tail end.

    quoted: the name is a JSON string.  With `close`, `start` and `opening` stand before all calls,
    and `close` behind them.
    """

    def grammar(tools: Sequence[Tool], choice: ToolChoice, special: SpecialTokens) -> str:
        rules, schemas = {}, []
        for i, tool in enumerate(tools):
            name = json.dumps(tool.name) if quoted else tool.name
            parts = [*texts(f"{head}{name}{middle}", special), f"args_{i}"]
            rules[tool.name] = " ".join([*parts, *texts(tail, special), *texts(end, special)])
            schemas.append(f"args_{i}: %json {json.dumps(schema_of(tool))}")
        around = [" ".join(texts(text, special)) for text in (opening, close)]
        lines = answer(rules, choice, literal(start, special), between, *around)
        return "\n".join([*lines, *schemas])

    return grammar


def parameter_calls(
    *,
    start: str,
    end: str,
    head: str,
    tail: str = "",
    parameter: str,
    parameter_end: str,
    between: str,
    opening: str = "",
    close: str = "",
) -> CallGrammar:
    """Calls with a parameter for each argument, in the order of the schema.

    head and parameter hold {} for a name, and parameter perhaps another for whether the value is a
    string.  Other values are JSON.  A string ends with the mark in `parameter_end`, whatever stands
    before the mark: so it is read.
    """
    end_mark = parameter_end.strip()
    line_break = parameter_end[parameter_end.index(end_mark) + len(end_mark) :]

    def grammar(tools: Sequence[Tool], choice: ToolChoice, special: SpecialTokens) -> str:
        rules, more = {}, []
        for i, tool in enumerate(tools):
            required = names_of(tool.parameters.get("required"))
            parts = texts(head.format(tool.name), special)
            for j, (name, schema) in enumerate(tool.properties.items()):
                choices = _choices(schema)
                # A string has no quotes, so what may be one is text.
                is_text = not choices and (schema == {} or "string" in types_of(schema))
                is_string = is_text or all(isinstance(v, str) for v in choices or [None])
                rule, before = f"p_{i}_{j}", parameter.format(name, str(is_string).lower())
                parts.append(rule if name in required else f"{rule}?")
                before, after = (" ".join(texts(t, special)) for t in (before, parameter_end))
                value, behind = f"v_{i}_{j}", ""
                if choices:
                    value, behind = f"{value}: {' | '.join(map(_bare, choices))}", after
                elif not is_text:
                    value, behind = f"{value}: {_json(schema, tool)}", after
                elif end_mark in special:  # by its id, so no text holds the mark
                    value, behind = f"{value}: /(?s:.*)/", after
                else:
                    value = f"{value}[suffix={literal(end_mark)}]: /(?s:.*)/"
                    behind = " ".join(texts(line_break, special))
                more += [f"{rule}: {before} v_{i}_{j} {behind}", value]
            rules[tool.name] = " ".join([*parts, *texts(tail, special), *texts(end, special)])
        around = [" ".join(texts(text, special)) for text in (opening, close)]
        lines = answer(rules, choice, literal(start, special), between, *around)
        return "\n".join([*lines, *more])

    return grammar


def _choices(schema: Any) -> Sequence[Any]:
    """The values that a schema allows, if it names them all."""
    if not isinstance(schema, dict):
        return ()
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            choices = [_choices(part) for part in parts]
            return [value for values in choices for value in values] if all(choices) else ()
    none = [None] if schema.get("type") == "null" else ()
    values = schema.get("enum", [schema["const"]] if "const" in schema else none)
    return values if isinstance(values, list) else ()


def _bare(value: Any) -> str:
    """A value as text: strings without quotes."""
    return literal(value if isinstance(value, str) else json.dumps(value))


def _json(schema: Any, tool: Tool) -> str:
    if isinstance(schema, dict):  # what the schema may refer to stands in the tool's
        schema = {**standalone(schema, tool.parameters), **_SPACES}
    return f"%json {json.dumps(schema)}"
