"""Grammars of calls with a tag for each argument: <parameter=path>a.txt</parameter>.

A string is written without quotes, up to the mark that ends values; other values are JSON.  So a
value that may be a string is free text: readers decide by the text which type it has.
"""

import json
import re

from vllm_metal_lite.chat_formats.grammars import (
    SPACES,
    CallGrammar,
    SpecialTokens,
    bare_names,
    calls_grammar,
    literal,
    text_without,
    texts,
)
from vllm_metal_lite.chat_formats.schema import (
    Schema,
    bare_text,
    listed,
    named_values,
    properties_of,
    types_of,
    values_of,
)
from vllm_metal_lite.chat_formats.schema_rules import SchemaRules
from vllm_metal_lite.chat_formats.tool import Tool

_ANY_TEXT = "/(?s:.*)/"


def parameter_calls(
    *,
    start: str,
    head: str,
    tail: str,
    parameter: str,
    parameter_end: str,
    without: str = "",
    **around: str,
) -> CallGrammar:
    """The grammar of calls with a parameter for each argument, in the order of the schema.

    head and parameter have {} for a name; parameter may have a second one, for whether the value is
    a string.  A string ends at the mark in `parameter_end`, as readers read it.
    without: characters that no name has.  around: see `calls_grammar`.
    """
    names = bare_names(without)

    def rule(tool: Tool, special: SpecialTokens, lines: list[str]) -> str:
        rules = ParameterRules(lines, tool, special, parameter, parameter_end)
        begin, end = texts(head.format(tool.name), special), texts(tail, special)
        calls = (rules.parameters(whole, names) for whole in rules.arguments())
        return " | ".join(" ".join([begin, *parts, end]) for parts in calls)

    return calls_grammar(rule, names, start=start, **around)


class ParameterRules(SchemaRules):
    """The rules of one tool's parameters.  parameter, end: see `parameter_calls`."""

    def __init__(
        self, lines: list[str], tool: Tool, special: SpecialTokens, parameter: str, end: str
    ) -> None:
        super().__init__(lines, tool)
        self._special, self._parameter, self._end = special, parameter, end

    def parameters(self, whole: Schema, names: str) -> list[str]:
        """The parameters of a call whose arguments match one alternative.  names: see `offered`."""
        self.hold(whole, "", "properties", "required", "additionalProperties")
        required, offered = listed(whole, "required"), self.offered(whole, names, "").items()
        return [
            self._parameter_of(whole, name, alternatives) + "?" * (name not in required)
            for name, alternatives in offered
        ]

    def _parameter_of(self, whole: Schema, name: str, alternatives: list[Schema]) -> str:
        """The name of a rule for one parameter: its tag, its value and the end."""
        place, after = f".properties.{name}", self._end
        named = [schema for schema in alternatives if named_values(schema)]
        others = [schema for schema in alternatives if schema not in named]
        kinds = types_of(others)
        is_text = bool(others) and (not kinds or "string" in kinds)
        is_string = is_text or types_of(alternatives) == {"string"}
        for schema in named:
            self.hold(schema, place)
        if is_text:
            value, after = self._text(self._limits(others, named, place))
        else:
            plain = [t for t in map(bare_text, values_of(named)) if self._end.strip() not in t]
            values = [self.add(" | ".join(map(literal, plain)), "V")] if plain else []
            if others:
                part = {"anyOf": others} if named else properties_of(whole)[name]
                values.append(f"%json {json.dumps({**self.resolve.standalone(part), **SPACES})}")
            value = self.add(" | ".join(values) or self.refuse(place))
        before = texts(self._parameter.format(name, str(is_string).lower()), self._special)
        return self.add(f"{before} {value} {texts(after, self._special)}")

    def _text(self, limits: str) -> tuple[str, str]:
        """(The terminals of a text within limits, the text after these terminals)."""
        before, mark, after = self._end.partition(self._end.strip())
        is_free = limits == _ANY_TEXT
        if not is_free and before:  # which is no part of the string
            limits, before = f"({limits}) {literal(before)}", ""
        without_mark = f"{limits} & {text_without(mark)}"
        if mark in self._special:  # by its id; its letters are no part of the string either
            return self.add(without_mark, "T"), before + mark + after
        # A mark before the limits are met would be the end.
        value = limits if is_free else without_mark
        return self.add(value, "v", f"[suffix={literal(mark)}]"), after

    def _limits(self, others: list[Schema], named: list[Schema], place: str) -> str:
        """The terminal of a value that may be a string.

        others, named: the alternatives of the value; those of `named` list their values.  If there
        are several, they must have no limits, because a reader cannot know which one is meant.
        """
        [schema, *more] = others
        if schema.get("type") != "string" or more or named:
            for schema in others if {} not in others else ():
                self.hold(schema, place)
            has_others = any(v is not None and type(v) is not str for v in values_of(named))
            if has_others and {} not in others:
                self.hold({"pattern": ""}, place)  # a text other than such a value
            return _ANY_TEXT
        pattern = _unanchored(str(schema.get("pattern", "")))
        self.hold(schema, place, "minLength", "maxLength", *(["pattern"] if pattern else []))
        limits = [f"/{pattern}/"] if pattern and "pattern" in schema else []
        if "minLength" in schema or "maxLength" in schema:
            limits.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
        return " & ".join(limits) or _ANY_TEXT


def _unanchored(pattern: str) -> str:
    """A regex for a whole text that contains `pattern`; "": it has anchors within."""
    begin, end = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    body = pattern[begin : len(pattern) - end]
    rest = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "", body)
    while rest != (outer := re.sub(r"\([^()]*\)", "", rest)):
        if re.search(r"[\^$]", rest):
            return ""
        rest = outer
    if re.search(r"[\^$]", rest) or ("|" in rest and (begin or end)):
        return ""
    body = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", body).replace("\n", r"\n")
    return f"{'' if begin else '(?s:.*)'}(?:{body}){'' if end else '(?s:.*)'}"
