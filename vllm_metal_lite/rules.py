"""What each option and each parameter may be: a rule annotates the field's type.

Python, JSON lines and flags all come to the same rules, so a bad value gets the same words
everywhere.  Numpy's scalars are numbers too; a field that passed holds a plain Python value.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from numbers import Integral, Real
from types import NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from vllm_metal_lite.errors import MetalLiteError, Option, show


@dataclass(frozen=True)
class Rule:
    """allowed: the words after "must be".  take: returns a value as a plain Python value, or raises
    one of _REFUSALS.  optional: None is allowed too and means "not given"."""

    allowed: str
    take: Callable[[Any], Any]
    optional: bool = False


class Flag(NamedTuple):
    """A field's flag on the command line.

    metavar: the value's name in the help.  help: "{allowed}" becomes the words of the rule.
    """

    metavar: str
    help: str


_REFUSALS = (TypeError, ValueError, OverflowError)
N = TypeVar("N", Rule, Flag)


@cache
def rules_of(kind: type) -> dict[str, Rule]:
    """The rule of each field of a dataclass; a field whose type includes None is optional."""
    rules = _notes(kind, Rule)
    return {f: replace(rule, optional=NoneType in get_args(plain)) for f, plain, rule in rules}


@cache
def flags_of(kind: type) -> dict[str, Flag]:
    """The flag of each field of a dataclass that has one."""
    words = {field: rule.allowed for field, rule in rules_of(kind).items()}
    return {
        field: flag._replace(help=flag.help.format(allowed=words.get(field)))
        for field, _, flag in _notes(kind, Flag)
    }


def _notes(kind: type, note_type: type[N]) -> Iterator[tuple[str, Any, N]]:
    """(field, its type, its note) of each field whose annotation has a note of this type."""
    for field, hint in get_type_hints(kind, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, note_type):
                yield field, hint.__origin__, note


def apply_rules(record: Any, error: type[MetalLiteError], parent: str | None = None) -> None:
    """Replace the fields of a frozen dataclass by plain values; raises `error` for a bad one.

    parent: the field that holds the record, if the record is part of another one.
    """
    for name, rule in rules_of(record.__class__).items():
        value = getattr(record, name)
        if value is None and rule.optional:
            continue
        try:
            plain = rule.take(value)
        except MetalLiteError:  # raised by a record inside this one
            raise
        except _REFUSALS:
            where = (Option(parent), f".{name}") if parent else (Option(name),)
            raise error(*where, f" must be {rule.allowed}, got {show(value)}") from None
        object.__setattr__(record, name, plain)


def integer(
    low: int, high: int | None = None, *, allowed: str | None = None, zero: bool = True
) -> Rule:
    """An integer from low to high, and not a bool.  zero: whether 0 is allowed."""

    def take(value: Any) -> int:
        value = _integer(value)
        _require(value >= low and (high is None or value <= high) and (zero or value != 0))
        return value

    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    return Rule(allowed or f"an integer {limits}", take)


def number(low: float, high: float | None = None, *, above: bool = False) -> Rule:
    """A finite number from low to high.  above: low itself is not allowed."""

    def take(value: Any) -> float:
        value = _number(value)
        _require(value > low if above else value >= low)
        _require(high is None or value <= high)
        return value

    if above:
        allowed = f"a number above {low}" + (f" and at most {high}" if high is not None else "")
    else:
        allowed = f"a number from {low} to {high}" if high is not None else f"a number >= {low}"
    return Rule(allowed, take)


def choice(*values: Any) -> Rule:
    """One of these values, which are all integers or all strings."""

    def take(value: Any) -> Any:
        value = _integer(value) if isinstance(values[0], int) else _text(value)
        return values[values.index(value)]

    *names, last = map(str, values)
    return Rule(f"{', '.join(names)} or {last}", take)


def switch() -> Rule:
    """A bool, and nothing that merely counts as true or false."""

    def take(value: Any) -> bool:
        # numpy's bool is not a bool, and numpy is not imported for `--help`.
        _require(isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"))
        return bool(value)

    return Rule("true or false", take)


def counts(defaults: Mapping[str, int]) -> Rule:
    """A dict of counts by name.  defaults: the counts of names that the dict leaves out."""

    def take(value: Any) -> dict[str, int]:
        _require(isinstance(value, Mapping) and value.keys() <= defaults.keys())
        found = {name: _integer(count) for name, count in value.items()}
        _require(min(found.values(), default=0) >= 0)
        return {**defaults, **found}

    *names, last = map(repr, defaults)
    return Rule(f"a dict of {', '.join(names)} or {last} to integers of at least 0", take)


def token_ids(*, empty: bool = True) -> Rule:
    def take(value: Any) -> tuple[int, ...]:
        _require(isinstance(value, (list, tuple)) and (empty or len(value) > 0))
        return tuple(map(_token_id, value))

    allowed = "a list of token ids" if empty else "a list of at least one token id"
    return Rule(allowed, take)


def biases() -> Rule:
    def take(value: Any) -> dict[int, float]:
        _require(isinstance(value, Mapping))
        return {_token_id(token): _number(bias) for token, bias in value.items()}

    return Rule("a dict of token ids to finite numbers", take)


def text() -> Rule:
    return Rule("a non-empty string of valid Unicode", _text)


def texts(*, alone: bool = False) -> Rule:
    """A list of non-empty strings that can be encoded.  alone: one string needs no list."""

    def take(value: Any) -> tuple[str, ...]:
        value = (value,) if alone and isinstance(value, str) else value
        _require(isinstance(value, (list, tuple)))
        return tuple(map(_text, value))

    allowed = "a list of non-empty strings of valid Unicode"
    if alone:
        allowed = "a non-empty string of valid Unicode, or a list of them"
    return Rule(allowed, take)


def whole(value: Any) -> Any:
    """Convert a value from JSON, where 2.0 is an integer, also in lists."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [whole(item) for item in value] if isinstance(value, list) else value


def by_token_id(bias: Any) -> Any:
    """A `logit_bias` from JSON, whose keys are strings: token ids become integers."""
    if not isinstance(bias, Mapping):
        return bias
    ids = {int(k) for k in bias if isinstance(k, str) and k.isdecimal() and len(k) < 20}
    by_key = {str(token_id): token_id for token_id in ids}  # "01" would be "1" again: it stays
    return {by_key.get(key, key): value for key, value in bias.items()}


def _require(ok: bool) -> None:
    if not ok:
        raise ValueError


def _integer(value: Any) -> int:
    _require(isinstance(value, Integral) and not isinstance(value, bool))
    return int(value)


def _number(value: Any) -> float:
    _require(isinstance(value, Real) and not isinstance(value, bool))
    value = float(value)
    _require(isfinite(value))
    return value


def _text(value: Any) -> str:
    _require(isinstance(value, str) and value != "")
    value.encode()  # fails for half a surrogate pair
    return str.__str__(value)


def _token_id(value: Any) -> int:
    value = _integer(value)
    _require(value >= 0)
    return value
