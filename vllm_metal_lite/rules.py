"""What each option and each parameter may be: one rule a field.

Python, JSON lines and flags all come to the same rules, so a bad value gets the same words
everywhere.  Numpy's scalars are numbers too; a field that passed holds a plain Python value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from numbers import Integral, Real
from typing import Any

from vllm_metal_lite.errors import MetalLiteError, Option, show


@dataclass(frozen=True)
class Rule:
    """allowed: in words, as in "must be ...".  take: a value as a plain Python one; raises
    _REFUSALS if it is not allowed.  optional: None is allowed too, for "not given".
    schema: the allowed values as a JSON schema."""

    allowed: str
    take: Callable[[Any], Any]
    optional: bool = False
    schema: Mapping[str, Any] = field(default_factory=dict)


_REFUSALS = (TypeError, ValueError, OverflowError)


def apply_rules(record: Any, rules: Mapping[str, Rule], error: type[MetalLiteError]) -> None:
    """Replace the fields of a frozen dataclass by plain values; raises `error` for a bad one."""
    for name, rule in rules.items():
        value = getattr(record, name)
        if value is None and rule.optional:
            continue
        try:
            plain = rule.take(value)
        except MetalLiteError:  # of a record within the record
            raise
        except _REFUSALS:
            raise error(Option(name), f" must be {rule.allowed}, got {show(value)}") from None
        object.__setattr__(record, name, plain)


def integer(
    low: int | None = None,
    high: int | None = None,
    *,
    allowed: str | None = None,
    optional: bool = False,
) -> Rule:
    """An integer from low to high; True and False are none."""

    def take(value: Any) -> int:
        value = _integer(value)
        _require((low is None or value >= low) and (high is None or value <= high))
        return value

    if allowed is None:
        allowed = "an integer" + (f" from {low} to {high}" if high is not None else "")
        allowed += f" of at least {low}" if low is not None and high is None else ""
    return Rule(allowed, take, optional, _limits("integer", minimum=low, maximum=high))


def number(
    low: float = 0, high: float | None = None, *, above: bool = False, optional: bool = False
) -> Rule:
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
    lowest = {"exclusiveMinimum" if above else "minimum": low}
    return Rule(allowed, take, optional, _limits("number", **lowest, maximum=high))


def _limits(kind: str, **limits: float | None) -> dict[str, Any]:
    given = {name: limit for name, limit in limits.items() if limit is not None}
    return {"type": kind, **given}


def choice(*values: Any, optional: bool = False) -> Rule:
    """One of the values, which are all integers or all strings."""

    def take(value: Any) -> Any:
        if isinstance(values[0], int):
            value = _integer(value)
        _require(isinstance(value, (int, str)))  # a list cannot be compared
        return values[values.index(value)]

    *names, last = map(str, values)
    return Rule(f"{', '.join(names)} or {last}", take, optional, {"enum": list(values)})


def switch() -> Rule:
    """A bool, and nothing that merely counts as true or false."""

    def take(value: Any) -> bool:
        # numpy's bool is not a bool, and numpy is not imported for `--help`.
        _require(isinstance(value, bool) or type(value).__name__ == "bool")
        return bool(value)

    return Rule("true or false", take, schema={"type": "boolean"})


def token_ids(*, empty: bool = True) -> Rule:
    def take(value: Any) -> tuple[int, ...]:
        _require(isinstance(value, (list, tuple)) and (empty or len(value) > 0))
        return tuple(map(_token_id, value))

    allowed = "a list of token ids" if empty else "a list of at least one token id"
    ids = {"type": "array", "items": _limits("integer", minimum=0), "minItems": 0 if empty else 1}
    return Rule(allowed, take, True, ids)


def biases() -> Rule:
    def take(value: Any) -> dict[int, float]:
        _require(isinstance(value, Mapping))
        return {_token_id(token): _number(bias) for token, bias in value.items()}

    keys = {"pattern": "^[0-9]+$"}  # of JSON
    schema = {"type": "object", "propertyNames": keys, "additionalProperties": {"type": "number"}}
    return Rule("a dict of token ids to finite numbers", take, True, schema)


def texts(*, alone: bool = False) -> Rule:
    """Strings that are not empty and can be encoded.  alone: one need not be in a list."""

    def take(value: Any) -> tuple[str, ...]:
        value = (value,) if alone and isinstance(value, str) else value
        _require(isinstance(value, (list, tuple)))
        _require(all(isinstance(text, str) and text for text in value))
        for text in value:
            text.encode()  # fails for half a surrogate pair
        return tuple(map(str, value))

    one = {"type": "string", "minLength": 1}
    many = {"type": "array", "items": one}
    if alone:
        allowed = "a non-empty string of valid Unicode, or a list of them"
        return Rule(allowed, take, True, {"anyOf": [one, many]})
    return Rule("a list of non-empty strings of valid Unicode", take, True, many)


def schema_of(rule: Rule) -> dict[str, Any]:
    """What a rule allows where null means "not given"."""
    return {"anyOf": [dict(rule.schema), {"type": "null"}]}


def whole(value: Any) -> Any:
    """A value from JSON, where 2.0 is an integer; also within lists."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [whole(item) for item in value] if isinstance(value, list) else value


def by_token_id(bias: Any) -> Any:
    """A `logit_bias` from JSON, whose keys are strings: token ids become integers."""
    if not isinstance(bias, Mapping):
        return bias
    ids = {k: int(k) for k in bias if isinstance(k, str) and k.isdecimal() and len(k) < 20}
    return {ids.get(key, key): value for key, value in bias.items()}


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


def _token_id(value: Any) -> int:
    value = _integer(value)
    _require(value >= 0)
    return value
