"""`/openapi.json`: the endpoints and the types of their requests.

Clients can be generated from it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_metal_lite import __version__
from vllm_metal_lite.rules import rules_of
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.body import Body
from vllm_metal_lite.server.params import RENAMED

_PARTS = "#/components/schemas/"


def route(routes: Sequence[Route], bodies: Mapping[str, type[Body]]) -> Route:
    """The route that serves the document.  bodies: the types of the requests, by path."""
    parts: dict[str, Any] = {}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "vllm-metal-lite", "version": __version__},
        "paths": {
            r.path.replace(":path", ""): {
                method.lower(): _operation(r, bodies.get(r.path), parts)
                for method in sorted((r.methods or set()) - {"HEAD"})
            }
            for r in routes
        },
        "components": {"schemas": parts},
    }

    async def openapi(request: Request) -> Response:
        return JSONResponse(document)

    return Route("/openapi.json", openapi)


def _operation(r: Route, body: type[Body] | None, parts: dict[str, Any]) -> dict[str, Any]:
    name = r.path.strip("/").replace("/", "_").replace("{", "").replace(":path}", "") or "page"
    operation: dict[str, Any] = {
        "operationId": name,
        "responses": {
            "200": {"description": "JSON, or server-sent events for a stream"},
            "default": {"description": "an error that names the field, the value and the limit"},
        },
    }
    if r.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in r.param_convertors
        ]
    if body is not None:
        parts[body.__name__] = schema = body.model_json_schema(ref_template=f"{_PARTS}{{model}}")
        parts |= schema.pop("$defs", {})
        hints = get_type_hints(SamplingParams)
        for field, described in schema["properties"].items():
            # A field without a type in the body has the type of SamplingParams, or is null.  In
            # Anthropic's API `thinking` is another field.
            name = RENAMED.get(field, field)
            hint = None if field == "thinking" else hints.get(name)
            if hint is not None and not described.keys() - {"title", "default"}:
                described |= TypeAdapter(hint | None).json_schema(ref_template=f"{_PARTS}{{model}}")
                described["description"] = rules_of(SamplingParams)[name].allowed
                parts |= described.pop("$defs", {})
        content = {"application/json": {"schema": {"$ref": f"{_PARTS}{body.__name__}"}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
