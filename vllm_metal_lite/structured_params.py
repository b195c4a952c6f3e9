"""The form of an answer and the limits of its thoughts: fields of SamplingParams."""

import json as json_format
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from vllm_metal_lite.errors import Option, SamplingError, one_line, show
from vllm_metal_lite.rules import Rule, apply_rules, integer, switch, text, texts, token_ids

# Between the parts of JSON: a space, or a line break and an indent.  Without a limit, a model may
# write spaces forever.
WHITESPACE = r"( |\r?\n[ \t]{0,40})?"
MAX_FORM = 200_000  # characters
KINDS = ("json", "json_object", "regex", "choice", "grammar")


def schema() -> Rule:
    """A JSON schema; a dict becomes its text."""

    def take(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return text().take(value)
        try:
            return json_format.dumps(value)
        except (TypeError, ValueError, RecursionError) as e:
            raise SamplingError(
                Option("structured_outputs"), f".json cannot be written as JSON: {one_line(e)}"
            ) from None

    return Rule("a JSON schema, as a dict or a non-empty string", take)


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an answer, under vLLM's names: exactly one of the first five.

    json: a JSON schema, as a dict or a string.  json_object: any JSON object.  regex: a pattern of
    the whole answer.  choice: one of these strings.  grammar: Lark (llguidance's dialect) or GBNF.
    disable_any_whitespace: JSON has no spaces and line breaks.  whitespace_pattern: otherwise, a
    regex that matches the text between the parts of JSON.  disable_additional_properties: an object
    has no other properties, unless its schema names additionalProperties.
    """

    json: Annotated[str | Mapping[str, Any] | None, schema()] = None
    json_object: Annotated[bool | None, switch()] = False
    regex: Annotated[str | None, text()] = None
    choice: Annotated[list[str] | tuple[str, ...] | None, texts()] = None
    grammar: Annotated[str | None, text()] = None
    disable_any_whitespace: Annotated[bool, switch()] = False
    disable_additional_properties: Annotated[bool, switch()] = False
    whitespace_pattern: Annotated[str | None, text()] = None

    def __post_init__(self) -> None:
        apply_rules(self, SamplingError, "structured_outputs")
        given = [name for name in KINDS if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            raise SamplingError(
                Option("structured_outputs"),
                f" must have one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}",
            )

    @property
    def kind(self) -> str:
        """The name of the field that gives the form."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False, ()))


@dataclass(frozen=True)
class ThinkingParams:
    """How a model marks its thoughts, for answers whose form begins after them.

    start, end: token ids of the markers.  is_open: the prompt ends within thoughts.  budget: after
    this number of tokens of thoughts, `end` is forced.
    is_channel: thoughts may begin at any place, end with the first token of `end`, and are part of
    the form, if there is one; the budget is for all thoughts together.
    """

    start: Annotated[tuple[int, ...] | list[int], token_ids()]
    end: Annotated[tuple[int, ...] | list[int], token_ids(empty=False)]
    is_open: Annotated[bool, switch()] = False
    budget: Annotated[int | None, integer(0)] = None
    is_channel: Annotated[bool, switch()] = False

    def __post_init__(self) -> None:
        apply_rules(self, SamplingError, "thinking")


def record(kind: type, option: str) -> Rule:
    """A dataclass of this module, or a dict of its fields.  option: the field with the record."""
    names = [field.name for field in fields(kind)]

    def take(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise ValueError
        unknown = [name for name in value if name not in names]
        if unknown:
            why = f" has no field {show(unknown[0])}; it has {', '.join(names)}"
            raise SamplingError(Option(option), why)
        return kind(**value)

    return Rule(f"a {kind.__name__} or a dict (JSON object) of its fields", take)
