"""A scripted server for programs that use client libraries: each answer depends on the request, and
the requests are kept."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.server.scripted import Script, hermes_call, scripted
from vllm_metal_lite.server import lifecycle

NEWS = "It is sunny in Lisbon."
# What the model writes for a property of a schema, by its name.
VALUES = {"city": "Lisbon", "degrees": 21, "answer": NEWS, "response": NEWS}
MOST = 160  # characters of a text that is kept


@dataclass
class Watched:
    """exchanges: the path and the body of each request, and what the model says."""

    script: Script
    exchanges: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[Watched]:
    make_app = lifecycle.make_app

    def note(path, raw):
        body = json.loads(raw)
        says = answer_to(body)
        seen.script.says(says)
        seen.exchanges.append({"path": path, "body": body, "says": says})

    def watching(server):
        app = make_app(server)

        async def watch(scope, receive, send):
            raw = b""

            async def read():
                nonlocal raw
                message = await receive()
                if message["type"] == "http.request" and scope["method"] == "POST":
                    raw += message["body"]
                    if not message["more_body"]:
                        note(scope["path"], raw)
                return message

            await app(scope, read, send)

        return watch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "make_app", watching)
        with scripted() as script:
            seen = Watched(script)
            yield seen


def answer_to(body: dict[str, Any]) -> str:
    """The text that the prompt asks for (SAY<text>); a call, if one is demanded or the prompt asks
    for the weather; an object of the schema that the request brings; else a sentence."""
    messages = body.get("messages", body.get("input"))
    last = json.dumps(messages[-1] if isinstance(messages, list) and messages else messages)
    if "SAY<" in last:
        return json.loads(f'"{last.rpartition("SAY<")[2].partition(">")[0]}"')
    tools, choice = body.get("tools"), body.get("tool_choice")
    has_result = "sunny in" in last
    if tools and (choice not in (None, "auto") or ("weather" in last and not has_result)):
        functions = [tool.get("function", tool) for tool in tools]
        named = [f for f in functions if f'"{f["name"]}"' in json.dumps(choice)]
        weather = [f for f in functions if "weather" in f["name"] and not has_result]
        function = (named or weather or functions[-1:])[0]
        return hermes_call(function["name"], **instance(function["parameters"]))
    form = body.get("response_format") or (body.get("text") or {}).get("format") or {}
    schema = form.get("json_schema", form).get("schema")
    if schema:
        return json.dumps(instance(schema))
    return NEWS if has_result else "Hello there."


def instance(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: VALUES[name] for name in schema["properties"]}


def recorded(exchanges: list[dict[str, Any]]) -> str:
    """Exchanges as JSON, one a line, without those like an earlier one.  Long texts are cut, and
    ids are numbered."""
    lines, shapes, ids = [], set(), {}
    for exchange in exchanges:
        text = json.dumps(_cut(exchange))
        for found in re.findall(r"\b[a-z]+_[0-9a-f]{20,}(?:_\d+)?", text):
            ids.setdefault(found, f"{found.partition('_')[0]}_{len(ids)}")
            text = text.replace(found, ids[found])
        shape = repr((exchange["path"], _shape(exchange["body"])))
        if shape not in shapes:
            shapes.add(shape)
            lines.append(text)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cut(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_cut(part) for part in value]
    return value[:MOST] if isinstance(value, str) else value


def _shape(value: Any, key: str = "") -> Any:
    """The keys and types of a value, with the data of four fields only."""
    if isinstance(value, dict):
        return sorted((name, _shape(part, name)) for name, part in value.items())
    if isinstance(value, list):
        return sorted({repr(_shape(part)) for part in value})
    return value if key in ("type", "role", "stream", "tool_choice") else type(value).__name__
