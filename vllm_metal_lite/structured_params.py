"""What an answer's form may be, and how long it may think: fields of SamplingParams."""

import json as json_format
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_metal_lite.errors import Option, SamplingError, one_line, show
from vllm_metal_lite.rules import Rule, apply_rules, integer, switch, text, texts, token_ids

# Between the parts of JSON: a space, or a line break and an indent.  Without a limit, a model may
# write spaces forever.
WHITESPACE = r"( |\r?\n[ \t]{0,40})?"
MAX_FORM = 200_000  # characters
KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an answer, under vLLM's names: exactly one of the first five.

    json: a JSON schema, as a dict or a string.  json_object: any JSON object.  regex: a pattern of
    the whole answer.  choice: one of these strings.  grammar: Lark (llguidance's dialect) or GBNF.
    disable_any_whitespace: JSON without spaces and line breaks.  whitespace_pattern: if they are
    allowed, a regex of what may stand between the parts of JSON.  disable_additional_properties: an
    object has no other properties, unless its schema names additionalProperties.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.json_object is None:  # as vLLM has it
            object.__setattr__(self, "json_object", False)
        apply_rules(self, _STRUCTURED_RULES, SamplingError)
        given = [name for name in KINDS if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            raise SamplingError(
                Option("structured_outputs"),
                f" must have one of {', '.join(KINDS)}, got {' and '.join(given) or 'none'}",
            )

    @property
    def kind(self) -> str:
        """The field that says what the form is."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False, ()))


@dataclass(frozen=True)
class ThinkingParams:
    """How a model marks its thoughts, for answers whose form begins after them.

    start, end: token ids of the markers.  is_open: the prompt ends within thoughts.  budget: most
    tokens of thoughts; then `end` is written for the model.
    is_channel: thoughts may begin at any place, end with the first token of `end`, and are part of
    the form, if there is one; the budget is for all thoughts together.
    """

    start: tuple[int, ...] | list[int]
    end: tuple[int, ...] | list[int]
    is_open: bool = False
    budget: int | None = None
    is_channel: bool = False

    def __post_init__(self) -> None:
        apply_rules(self, _THINKING_RULES, SamplingError)


def _schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json_format.dumps(schema)
    except (TypeError, ValueError, RecursionError) as e:
        raise SamplingError(
            Option("structured_outputs"), f".json cannot be written as JSON: {one_line(e)}"
        ) from None


_STRUCTURED_RULES = {
    "json": text(),
    "json_object": switch(),
    "regex": text(),
    "choice": texts(),
    "grammar": text(),
    "disable_any_whitespace": switch(),
    "disable_additional_properties": switch(),
    "whitespace_pattern": text(),
}
_THINKING_RULES = {
    "start": token_ids(),
    "end": token_ids(empty=False),
    "is_open": switch(),
    "budget": integer(0, optional=True),
    "is_channel": switch(),
}


def record(kind: type) -> Rule:
    """A dataclass of this module, or a dict of its fields."""
    names = [field.name for field in fields(kind)]

    def take(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise ValueError
        unknown = [name for name in value if name not in names]
        if unknown:
            raise SamplingError(
                f"{kind.__name__} has no field {show(unknown[0])}; it has {', '.join(names)}"
            )
        return kind(**value)

    return Rule(f"a {kind.__name__} or a dict (JSON object) of its fields", take, True)
