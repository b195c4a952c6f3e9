"""Events of a parsed answer."""

from typing import NamedTuple


class Text(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Thoughts."""

    text: str


class ToolCall(NamedTuple):
    """A call begins.  Ids that models write are left out, because they repeat."""

    name: str


class Arguments(NamedTuple):
    """A piece of the arguments of the call that began last: together one JSON object."""

    text: str


class ToolCallEnd(NamedTuple):
    """is_whole: False if the call was cut short, or if its arguments are no JSON object."""

    is_whole: bool = True


Event = Text | Reasoning | ToolCall | Arguments | ToolCallEnd
