"""The tools of a request, of whatever API."""

from collections.abc import Collection, Mapping
from typing import Any

from vllm_metal_lite.chat_formats.tool import Tool
from vllm_metal_lite.errors import show
from vllm_metal_lite.server.errors import ApiError


def function_tool(
    definition: Any, where: str, *, schema: str = "parameters", taken: Collection[str] = ()
) -> Tool:
    """A Tool of a definition with name, description and schema.

    where: names the definition in errors.  schema: the name of the field that holds it.  taken:
    names of other tools.  Raises ApiError (400).
    """
    if not isinstance(definition, Mapping):
        raise bad(f"{where} must be an object, got {show(definition)}", where)
    name = definition.get("name")
    if not isinstance(name, str) or not name:
        raise bad(f"{where}.name must be a non-empty string, got {show(name)}", f"{where}.name")
    if name in taken:
        raise bad(f"{where}.name: another tool is called {show(name)} too", f"{where}.name")
    description, parameters = definition.get("description"), definition.get(schema)
    if not isinstance(description, str | None):
        at = f"{where}.description"
        raise bad(f"{at} must be a string, got {show(description)}", at)
    if not isinstance(parameters, dict | None):
        raise bad(
            f"{where}.{schema} must be an object, got {show(parameters)}", f"{where}.{schema}"
        )
    for key, kind, words in (("properties", dict, "an object"), ("required", list, "an array")):
        value = (parameters or {}).get(key)
        if value is not None and not isinstance(value, kind):
            at = f"{where}.{schema}.{key}"
            raise bad(f"{at} must be {words}, got {show(value)}", at)
    strict = definition.get("strict") is True
    return Tool(name, description or "", parameters or {}, strict)


def check_named(name: Any, tools: Collection[Tool], where: str) -> str:
    """The name of a tool of the request.  Raises ApiError (400)."""
    if not isinstance(name, str) or name not in {tool.name for tool in tools}:
        raise bad(f"{where} names a tool that `tools` does not have: {show(name)}", where)
    return name


def bad(message: str, where: str) -> ApiError:
    return ApiError(400, message, param=where)
