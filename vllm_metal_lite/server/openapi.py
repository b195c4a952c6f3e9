"""`/openapi.json`: the endpoints, described by the types and rules that check their requests."""

from collections.abc import Sequence
from typing import Any

from starlette.routing import Route

from vllm_metal_lite import __version__
from vllm_metal_lite.rules import schema_of
from vllm_metal_lite.sampling_params import SAMPLING_RULES
from vllm_metal_lite.server import limits
from vllm_metal_lite.server.params import RENAMED, SamplingFields
from vllm_metal_lite.server.server import Body

_PARTS = "#/components/schemas/"
_SIZES = {"array": "maxItems", "object": "maxProperties"}
_ERROR = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """An OpenAPI document, version 3.1."""
    parts: dict[str, Any] = {"Error": _ERROR}
    paths = {
        route.path.replace(":path", ""): {
            method.lower(): _operation(route, parts)
            for method in sorted(route.methods or ())
            if method != "HEAD"
        }
        for route in routes
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "vllm-metal-lite", "version": __version__},
        "paths": paths,
        "components": {"schemas": parts},
    }


def _operation(route: Route, parts: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": f"{_PARTS}Error"}}}
    operation: dict[str, Any] = {
        "responses": {
            "200": {"description": "as the API says; events for a stream"},
            "default": {"description": "an error that names the field", "content": error},
        }
    }
    for name in route.param_convertors:
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        operation.setdefault("parameters", []).append(parameter)
    body_type: type[Body] | None = getattr(route.endpoint, "body_type", None)
    if body_type is not None:
        content = {"application/json": {"schema": _body(body_type, parts)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _body(body_type: type[Body], parts: dict[str, Any]) -> dict[str, Any]:
    """The schema of a body.  Fields that SamplingParams checks have its rules, and `limits`."""
    schema = body_type.model_json_schema(ref_template=f"{_PARTS}{{model}}")
    parts |= schema.pop("$defs", {})
    if issubclass(body_type, SamplingFields):
        for name, field in schema["properties"].items():
            rule = SAMPLING_RULES.get(RENAMED.get(name, name))
            if rule is not None and name != "thinking" and not field.keys() - {"title", "default"}:
                field |= schema_of(rule)
    for name, field in schema["properties"].items():
        _bound(field, limits.MAX_ENTRIES.get(name, limits.MAX_OTHER_ENTRIES))
    return schema


def _bound(schema: dict[str, Any], most: int) -> None:
    """Say how many entries a value may have."""
    if size := _SIZES.get(schema.get("type", "")):
        schema[size] = most
    for kind in schema.get("anyOf", ()):
        _bound(kind, most)
