"""JSON of whole replies, encoded off the event loop: a reply may hold many log-probabilities."""

import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from vllm_metal_lite.server.offload import offload

_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def encode_slowly(value: Any) -> str:
    """JSON, made by Python's encoder: C's encoder holds Python's lock until it is done."""
    return "".join(_encoder.iterencode(value))


async def whole_json(make: Callable[[], Any]) -> Response:
    """A response with the JSON of what `make` returns; both are done on a thread."""

    def write() -> bytes:
        # An argument of a call may hold a lone surrogate: UTF-8 has none, so JSON escapes it.
        return encode_slowly(make()).encode(errors="backslashreplace")

    return Response(await offload(write), media_type="application/json")
