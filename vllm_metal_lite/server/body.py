"""The base of all bodies of requests."""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from vllm_metal_lite.rules import whole
from vllm_metal_lite.server.limits import check_fields, check_json


class Body(BaseModel):
    """Unknown fields are ignored, with one line in the log for each name."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    user: Any = None  # a part of the client's identity, see `server.endpoint`

    _check_fields = model_validator(mode="before")(check_fields)
    _whole = field_validator("*", mode="before")(whole)

    def check(self) -> None:
        """Raise ApiError (400) for fields that contradict each other.  No model is loaded yet."""

    @property
    def prompt_field(self) -> str:
        """The field with the prompt, for errors."""
        own = [name for name in ("messages", "prompt", "input") if name in type(self).model_fields]
        return next(name for name in own if getattr(self, name) is not None)


B = TypeVar("B", bound=Body)


def read_body(body_type: type[B], raw: bytes) -> B:
    """The body that a request's JSON holds.  Raises ApiError or ValidationError."""
    check_json(raw)
    return body_type.model_validate_json(raw)
