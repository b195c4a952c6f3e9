"""The base of all bodies of requests."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from vllm_metal_lite.errors import show
from vllm_metal_lite.rules import whole
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.fields import IdleSeconds
from vllm_metal_lite.server.request_limits import check_fields, check_json

# The known fields of objects within bodies that no type of pydantic describes, by place.
_NESTED = {
    "stream_options": ("include_usage", "continuous_usage_stats"),
    "response_format": ("type", "json_schema", "schema"),
    "response_format.json_schema": ("name", "description", "schema", "strict"),
    "text.format": ("type", "name", "description", "schema", "strict"),
    "tools.function": ("name", "description", "parameters", "strict"),
}
# Fields without effect.  The log does not name them: clients send them unasked.
IGNORED = {"client_metadata", "container", "inference_geo", "metadata", "prediction", "verbosity"}
IGNORED |= {"cache_control", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
IGNORED |= {"context_management", "max_tool_calls", "safety_identifier", "service_tier", "store"}


class Body(BaseModel):
    """The body of a request.  Unknown fields are ignored, and the log names each of them once."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    user: Any = None  # a part of the client's identity, see `server.endpoint`
    keep_alive: IdleSeconds = None  # see `Models.use`

    _check_fields = model_validator(mode="before")(check_fields)
    _whole = field_validator("*", mode="before")(whole)

    def unknown_fields(self) -> Iterator[str]:
        """The names of the fields that no one reads, with their places in the body."""
        yield from (name for name in self.model_extra or () if name not in IGNORED)
        for place, known in _NESTED.items():
            objects: list[Any] = [self]
            for name in place.split("."):
                inner = [dict(o).get(name) for o in objects if isinstance(o, dict | BaseModel)]
                objects = [
                    o for found in inner for o in (found if type(found) is list else [found])
                ]
            for found in objects:
                names = dict(found) if isinstance(found, dict | BaseModel) else ()
                yield from (f"{place}.{name}" for name in names if name not in known)

    def check(self) -> None:
        """Raise ApiError (400) for fields that contradict each other.  No model is loaded yet."""

    @property
    def prompt_field(self) -> str:
        """The name of the field with the prompt, for errors."""
        own = [name for name in ("messages", "prompt", "input") if name in type(self).model_fields]
        return next(name for name in own if getattr(self, name) is not None)


B = TypeVar("B", bound=Body)


def read_body(body_type: type[B], raw: bytes) -> B:
    """The body that a request's JSON holds.  Raises ApiError."""
    check_json(raw)
    try:
        return body_type.model_validate_json(raw)
    except ValidationError as e:
        first = e.errors(include_url=False, include_context=False)[0]
    message = first["msg"]
    if first["type"] == "json_invalid":
        raise ApiError(400, message)
    where, is_missing = _place(first["loc"], from_json(raw)), first["type"] == "missing"
    if is_missing:
        where = ".".join(filter(None, (where, str(first["loc"][-1]))))
    else:  # otherwise the input is the whole body
        message += f", got {show(first['input'])}"
    raise ApiError(400, f"{where}: {message}" if where else message, param=where or None)


def _place(loc: tuple[int | str, ...], value: Any) -> str:
    """A place as the client wrote it, without the types that pydantic tried and named."""
    parts = []
    for part in loc:
        with suppress(KeyError, IndexError, TypeError):
            value = value[part]
            parts.append(str(part))
    return ".".join(parts)
