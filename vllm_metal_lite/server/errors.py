"""Errors of requests, in the shape of each API.

A handler raises ApiError, or lets a MetalLiteError of the engine through.
"""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from vllm_metal_lite.errors import NOT_FINITE, BusyError, MetalLiteError, show
from vllm_metal_lite.server.stream import DONE, encode, event, sse
from vllm_metal_lite.server.worker.messages import Delta, EngineLost
from vllm_metal_lite.server.worker.request_state import ShuttingDown

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """A request that is not served.

    status: the HTTP status.  param: the name of the field at fault.  code: OpenAI's error code.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


def bad(where: str, what: str) -> ApiError:
    """An error of status 400; its message is the place followed by the fault there."""
    return ApiError(400, where + what, param=where)


def must_be(where: str, allowed: str, value: Any) -> ApiError:
    """An error of status 400 that names the place, the allowed values and the value."""
    return bad(where, f" must be {allowed}, got {show(value)}")


class ContextOverflow(ApiError):
    """The prompt leaves no room in the context.  Each API has words that its clients look for.

    `server.endpoint` sets `param`, because fields of several names hold prompts.
    """

    def __init__(self, num_prompt_tokens: int, max_model_len: int, why: str = "") -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, your "
            f"request has {num_prompt_tokens} prompt tokens. Please reduce the length of the "
            f"prompt.{why}",
            code="context_length_exceeded",
        )
        self.num_prompt_tokens, self.max_model_len = num_prompt_tokens, max_model_len


def shown_error(e: Exception) -> ApiError:
    """The ApiError that the client gets for an exception; an unknown one is logged."""
    if isinstance(e, ApiError):
        return e
    if isinstance(e, BusyError):
        return ApiError(503, str(e), code="server_busy", headers={"Retry-After": "1"})
    if isinstance(e, MetalLiteError):
        return ApiError(_status_of(str(e)), str(e), param=e.option)
    if isinstance(e, EngineLost):
        return ApiError(503, str(e), code=e.code, headers={"Retry-After": "5"})
    logger.error("a request failed", exc_info=e)
    return ApiError(500, "internal error: see the server's log")


def check_ended(delta: Delta) -> None:
    """Raise ApiError for an answer that failed, ShuttingDown for one that the server cut off."""
    if delta.finish_reason == "error":
        why = delta.error or "no further token can be sampled"
        raise ApiError(_status_of(why), why)
    if delta.finish_reason == "abort":
        raise ShuttingDown


def _status_of(why: str) -> int:
    return 500 if NOT_FINITE in why else 400


# Error types by status.  All other statuses below 500 share one type, and so do those from 500 on.
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 503: "overloaded_error"}


def openai_shape(e: ApiError) -> dict[str, Any]:
    other = "server_error" if e.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(e.status, other)
    return {"error": {"message": e.message, "type": kind, "param": e.param, "code": e.code}}


def anthropic_shape(e: ApiError) -> dict[str, Any]:
    other = "api_error" if e.status >= 500 else "invalid_request_error"
    kind, message = _ANTHROPIC_TYPES.get(e.status, other), e.message
    if isinstance(e, ContextOverflow):
        message = f"prompt is too long: {e.num_prompt_tokens} tokens > {e.max_model_len} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_event(e: Exception, path: str) -> bytes:
    """The events that end a stream before its first event, in the form of the path's API."""
    error = shown_error(e)
    if path.startswith("/v1/messages"):
        return sse(encode(anthropic_shape(error)), "error")
    if path.startswith("/v1/responses"):
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return event("error", sequence_number=0, **fields)
    return sse(encode(openai_shape(error))) + DONE


def error_response(e: Exception, path: str) -> JSONResponse:
    """The reply to an exception, in the shape of the path's API."""
    error = shown_error(e)
    shape = anthropic_shape if path.startswith("/v1/messages") else openai_shape
    return JSONResponse(shape(error), error.status, error.headers)
