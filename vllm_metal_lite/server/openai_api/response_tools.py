"""The tools of the Responses API as a model sees them, and its calls as the client wants them.

A model knows functions only, by flat names.  A tool in a namespace is called NAMESPACE__TOOL; the
namespace `functions` is that of plain functions.  Tools that the API's host would run (web_search,
...) are left out, with a line in the log.

A custom tool is a function of one string: FreeformInput reads its text from the JSON arguments.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_metal_lite.chat_formats.tool import Tool
from vllm_metal_lite.errors import show
from vllm_metal_lite.server.errors import bad, must_be
from vllm_metal_lite.server.fields import optional, required_text, required_type, type_of
from vllm_metal_lite.server.request_tools import add_tool, check_named, function_tool, openai_choice

PARAMETER = "input"

_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# A unit is decoded at once: plain characters, or one escape.
_UNIT = re.compile(
    r'(?P<end>")'
    r'|(?P<begun>\\(?:u[^"]{0,9})?\Z)'  # an escape that may grow, at most to a surrogate pair
    r"|(?P<escape>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r'|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt])'
    r'|[^"\\]+|\\'  # JSON does not have every escape
)


class FreeformInput:
    """Takes `{"input": "..."}` in pieces of any size, and returns the text as it comes.

    Arguments of another form are kept until their end.  An object with one string then becomes that
    string; anything else is returned unchanged.
    """

    def __init__(self) -> None:
        self._raw = ""  # not yet given
        self._begun = self._ended = False

    def feed(self, piece: str) -> str:
        """The text that is new."""
        if self._ended:
            return ""
        self._raw += piece
        if not self._begun:
            start = _START.match(self._raw)
            if start is None:
                return ""
            self._begun, self._raw = True, self._raw[start.end() :]
        return self._decoded()

    def close(self) -> str:
        """The rest, at the end of the arguments."""
        if self._begun or not self._raw:
            return ""
        try:
            arguments: Any = json.loads(self._raw)
        except (ValueError, RecursionError):
            return self._raw
        values = list(arguments.values()) if isinstance(arguments, dict) else [arguments]
        if isinstance(arguments, dict) and PARAMETER in arguments:
            values = [arguments[PARAMETER]]
        return values[0] if len(values) == 1 and isinstance(values[0], str) else self._raw

    def _decoded(self) -> str:
        """Decode whole units; the rest waits."""
        at, text = 0, []
        for unit in _UNIT.finditer(self._raw):
            self._ended = unit["end"] is not None
            if self._ended or unit["begun"] is not None:
                break
            text.append(json.loads(f'"{unit[0]}"') if unit["escape"] else unit[0])
            at = unit.end()
        self._raw = self._raw[at:]
        return "".join(text)


logger = logging.getLogger(__name__)

_PLAIN_NAMESPACE = "functions"
_left_out: set[str] = set()  # the types of tools that the log has named


@dataclass(frozen=True)
class Callee:
    """The name of a call in the Responses API.  kind: "function" or "custom"."""

    kind: str
    name: str
    namespace: str | None = None


def flat_name(namespace: Any, name: str) -> str:
    """The name under which a model knows a tool."""
    if not isinstance(namespace, str) or namespace in ("", _PLAIN_NAMESPACE):
        return name
    return f"{namespace.removesuffix('__')}__{name}"


class ResponseTools:
    """The tools of a request.

    tools: keys are flat names.  callees: their names in the API.  choice: the calls that may come.
    definitions: the client's definitions of tools that are not left out.
    """

    def __init__(self, definitions: Any, items: Any, choice: Any, parallel: bool) -> None:
        """definitions: the field `tools`.  items: the field `input`, which may hold more tools
        (additional_tools).  choice: the field `tool_choice`.  Raises ApiError (400)."""
        self.tools: dict[str, Tool] = {}
        self.callees: dict[str, Callee] = {}
        self.definitions: list[Mapping[str, Any]] = []
        self._add_all(definitions, "tools")
        for i, item in enumerate(items if isinstance(items, list) else ()):
            if type_of(item) == "additional_tools":
                self._add_all(item.get("tools"), f"input.{i}.tools")
        self.choice = openai_choice(choice, parallel, self.tools, _TOOLS, self._name_of)

    def _add_all(self, definitions: Any, where: str) -> None:
        if not isinstance(definitions, list | None):
            raise must_be(where, "a list", definitions)
        for i, definition in enumerate(definitions or ()):
            self._add(definition, f"{where}.{i}")

    def _add(self, definition: Any, where: str) -> None:
        if required_type(definition, where) == "namespace":
            namespace = required_text(definition, "name", where)
            inner = definition.get("tools")
            if not isinstance(inner, list):
                raise must_be(f"{where}.tools", "a list", inner)
            for i, tool in enumerate(inner):
                self._add_callable(tool, namespace, f"{where}.tools.{i}")
        elif not self._add_callable(definition, None, where):
            return
        self.definitions.append(definition)

    def _add_callable(self, definition: Any, namespace: str | None, where: str) -> bool:
        """Add a tool that a model can call; False if the tool is left out."""
        kind = required_type(definition, where)
        if kind not in _TOOLS:
            if kind not in _left_out and len(_left_out) < 100:
                _left_out.add(kind)
                logger.warning(
                    f"tools of type {show(kind)} are left out: models here call functions and "
                    "custom tools"
                )
            return False
        tool = _TOOLS[kind](definition, where)
        name = flat_name(namespace, tool.name)
        add_tool(self.tools, replace(tool, name=name), where)
        self.callees[name] = Callee(kind, tool.name, namespace)
        return True

    def _name_of(self, chosen: Any, where: str) -> str | None:
        """The model's name for a tool.  The client may leave out the namespace."""
        if required_type(chosen, where) not in _TOOLS:
            return None
        name = required_text(chosen, "name", where)
        flat = flat_name(chosen.get("namespace"), name)
        if flat in self.callees:
            return flat
        inside = [flat for flat, callee in self.callees.items() if callee.name == name]
        if chosen.get("namespace") is not None or not inside:
            check_named(name, (), where)
        if len(inside) > 1:
            raise bad(where, f" names {show(name)}, which several namespaces have: name one")
        return inside[0]


def _custom_tool(definition: Mapping[str, Any], where: str) -> Tool:
    """A function of one string, whose description has the tool's grammar if there is one."""
    format_ = optional(definition, "format", dict, where) or {}
    about = "The whole input of the tool, as plain text."
    if format_.get("type") == "grammar":
        about += (
            f" It must match this {format_.get('syntax')} grammar:\n{format_.get('definition')}"
        )
    parameters = {
        "type": "object",
        "properties": {PARAMETER: {"type": "string", "description": about}},
        "required": [PARAMETER],
        "additionalProperties": False,
    }
    return replace(function_tool(definition, where), parameters=parameters)


_TOOLS = {"function": function_tool, "custom": _custom_tool}
