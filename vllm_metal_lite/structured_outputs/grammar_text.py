"""Converts the form of an answer that a request gives to llguidance's own format."""

import json
import re
from typing import Any

from llguidance import LLMatcher, grammar_from
from llguidance.gbnf_to_lark import is_lark_syntax

from vllm_metal_lite.errors import Option, SamplingError, one_line, show
from vllm_metal_lite.structured_outputs.json_schema import SchemaError, closed, prepared
from vllm_metal_lite.structured_params import MAX_FORM, WHITESPACE, StructuredOutputsParams

# The time to compile grows faster than these sizes.  Within the limits, a hostile grammar takes a
# second or two.  MAX_FORM is such a limit, too.
MAX_LINES = 4_000  # in Lark's syntax, where each rule has a line of its own
MAX_GBNF_LINES = 500  # in GBNF, which Python code translates to Lark's syntax
# Lark's texts, comments and regexes: their contents are no syntax.  If one does not end, the rest
# of the line or the grammar belongs to it and is read only once.
_LITERAL = r'"(?:\\.|[^"\\\n])*"?|#[^\n]*|//[^\n]*|/(?:\\.|[^/\\])+/?'
_SCHEMA = re.compile(rf"{_LITERAL}|(%json\s*(?=\{{))")
TOKEN = re.compile(rf"{_LITERAL}|(<\[\^?[\d,-]+\]>|<[^<>\s\[][^<>\s]*>)")  # by id or name


class GrammarError(SamplingError):
    """A grammar that cannot be used.

    kind: the field of StructuredOutputsParams.  place: where in its value, as ".properties.age".
    """

    def __init__(self, kind: str, place: str, why: str) -> None:
        super().__init__(Option("structured_outputs"), f".{kind}{place}: {why}")
        self.kind, self.place, self.why = kind, place, why


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own format.  Raises GrammarError if that is not possible."""
    kind, given = params.kind, getattr(params, params.kind)
    try:
        size = sum(map(len, given)) if kind == "choice" else len(str(given))
        _limit(size, MAX_FORM, "characters")
        if kind in ("json", "json_object"):
            schema = json.loads(str(params.json)) if kind == "json" else {"type": "object"}
            return _schema_text(schema, params)
        if kind == "regex":
            return grammar_from("regex", given)
        if kind == "choice":
            # One terminal: thousands of alternatives of a rule would be too many for the parser.
            texts = " | ".join(map(json.dumps, given))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        is_lark = is_lark_syntax(given)
        if not is_lark and "::=" not in given:
            needed = "a rule `start:` (Lark) or `root ::=` (GBNF)"
            raise ValueError(f"needs {needed}, got {show(given)}")
        _limit(given.count("\n") + 1, MAX_LINES if is_lark else MAX_GBNF_LINES, "lines")
        return grammar_from("grammar", _embedded(given) if is_lark else given)
    except SchemaError as e:
        raise GrammarError(kind, e.place, one_line(e)) from None
    except (ValueError, RecursionError) as e:
        raise GrammarError(kind, "", one_line(e)) from None


def _schema_text(schema: Any, params: StructuredOutputsParams) -> str:
    """The grammar of a JSON schema, under the options of `params`.  Raises ValueError."""
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be an object, got {show(schema)}")
    # Refuse keywords that llguidance lacks, even if the schema itself sets "lenient".
    options: Any = {"lenient": False, "whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    if params.disable_any_whitespace:
        options = {"lenient": False, "whitespace_flexible": False}
        options |= {"item_separator": ",", "key_separator": ":"}
    if params.disable_additional_properties:
        schema = closed(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(prepared(schema)), overrides=options)


def _embedded(lark: str) -> str:
    """The grammar with its JSON schemas (`%json {...}`) prepared.  Raises SchemaError."""
    decoder, pieces, end = json.JSONDecoder(), [], 0
    for found in _SCHEMA.finditer(lark):
        if found[1] is None or found.start() < end:
            continue
        try:
            schema, after = decoder.raw_decode(lark, found.end())
        except ValueError:  # llguidance says why
            continue
        pieces += [lark[end : found.end()], json.dumps(prepared(schema))]
        end = after
    return "".join([*pieces, lark[end:]])


def _limit(size: int, most: int, unit: str) -> None:
    if size > most:
        raise ValueError(f"{size} {unit}, and at most {most} are allowed")
