"""The form of an answer, from the fields of each API and from the calls that a request demands."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from json import dumps, loads
from typing import Any

from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.grammars import schema_of
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.errors import install, show
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.errors import ApiError, bad, must_be
from vllm_metal_lite.server.fields import type_of
from vllm_metal_lite.server.offload import GRAMMARS, offload
from vllm_metal_lite.structured_outputs.json_schema import SchemaError, without_numbers
from vllm_metal_lite.structured_params import StructuredOutputsParams


def form_of(form: Any, where: str) -> tuple[StructuredOutputsParams, str] | None:
    """The form of an answer, and the field that says it; None: plain text.  Raises ApiError (400).

    form: {"type": "text"}, {"type": "json_object"}, perhaps with a `schema`, or {"type":
    "json_schema"} with its `schema`, in the object itself or in one named `json_schema`.  where:
    names the object in errors.
    """
    if form is None:
        return None
    kind = type_of(form)
    if kind == "text":
        return None
    if kind == "json_object" and form.get("schema") is None:
        return StructuredOutputsParams(json_object=True), where
    if kind not in ("json_object", "json_schema"):
        raise must_be(f"{where}.type", "text, json_object or json_schema", kind)
    if kind == "json_schema" and isinstance(inner := form.get("json_schema"), Mapping):
        form, where = inner, f"{where}.json_schema"
    schema = form.get("schema")
    if not isinstance(schema, Mapping):
        raise must_be(f"{where}.schema", "an object", schema)
    return StructuredOutputsParams(json=schema), f"{where}.schema"


async def with_form(params: SamplingParams, form: Any, where: str) -> SamplingParams:
    """The parameters, with the form that the request asks for.  Raises ApiError (400)."""
    own = params.structured_outputs
    if (asked := form_of(form, where)) is not None:
        if own is not None:
            raise bad(where, " and structured_outputs cannot both be given")
        structured, field = asked
        await check_form(structured, field)
        return replace(params, structured_outputs=structured)
    if own is not None:
        await check_form(own, f"structured_outputs.{own.kind}")
    return params


async def check_calls(form: StructuredOutputsParams, tools: Sequence[Tool]) -> None:
    """Check the grammar of calls and the schema of each tool: the grammar may have only parts of a
    schema.  Errors name the tool and the place in its schema."""
    await _check_schemas({tool.name: without_numbers(schema_of(tool)) for tool in tools})
    try:
        await check_form(form, "tools")
    except ApiError:
        await _check_schemas({tool.name: schema_of(tool) for tool in tools})
        raise


async def _check_schemas(schemas: Mapping[str, dict[str, Any]]) -> None:
    for name, schema in schemas.items():
        try:
            await check_form(StructuredOutputsParams(json=schema), f"tools: {show(name)}")
        except ApiError as e:
            raise ApiError(400, e.message, param="tools") from None


async def check_form(structured: StructuredOutputsParams, field: str) -> None:
    """Raise ApiError (400) for a form that no model's answer could be held to.

    field: the name of the field that gives the form, for errors.  A check takes milliseconds, or a
    second for a hostile grammar.  It runs on a thread of this process, so that neither the event
    loop nor an engine waits.
    """
    try:
        from vllm_metal_lite.structured_outputs.compiler import check
        from vllm_metal_lite.structured_outputs.grammar_text import GrammarError
    except ModuleNotFoundError as e:
        raise bad(field, f" needs {e.name}: {install('structured')}") from e
    try:
        await offload(check, structured, threads=GRAMMARS)
    except GrammarError as e:
        raise bad(field + e.place, f": {e.why}") from None


def answer_form(
    chat_format: ChatFormat,
    special_tokens: Mapping[str, int],
    tools: Sequence[Tool],
    choice: ToolChoice,
    form: StructuredOutputsParams | None,
) -> StructuredOutputsParams | None:
    """The form of an answer after its thoughts; None: any form.

    form: the form of an answer without calls, or of the final channel if the model writes in
    channels.
    Demanded calls follow the grammar of the model's format.  Optional calls follow it if a tool is
    strict or `form` is JSON; other forms exclude calls.  Raises ApiError (400) for demanded calls
    if the format has no grammar, and for calls that the format cannot write.
    """
    is_demanded = choice.mode in ("required", "named")
    if chat_format.grammar is None:
        if is_demanded:
            why = f"the model's format ({chat_format.name}) has no grammar for calls"
            raise bad("tool_choice", f" must be 'auto' or 'none': {why}")
        return form
    if is_demanded:
        form = None
    elif choice.mode == "none" or not (form is None or form.kind in ("json", "json_object")):
        tools = ()
    is_strict = any(tool.strict for tool in tools)
    in_channel = chat_format.thoughts is not None and chat_format.thoughts.in_channel
    if not (is_demanded or is_strict if form is None else tools or in_channel):
        return form
    final = "" if form is None else _term(form)
    try:
        grammar = chat_format.grammar(tools, choice, special_tokens, final)
    except SchemaError as e:
        raise ApiError(400, f"tools{e.place}: {e}", param="tools") from None
    return StructuredOutputsParams(grammar=grammar)


def _term(form: StructuredOutputsParams) -> str:
    """The text that puts a form into a grammar in Lark's syntax."""
    from vllm_metal_lite.structured_outputs.grammar_text import grammar_text

    text = grammar_text(form)
    try:
        [grammar] = loads(text)["grammars"]
    except ValueError:  # the text is a grammar in Lark's syntax, made from GBNF
        grammar = {"lark_grammar": text}
    if schema := grammar.get("json_schema"):
        return f"%json {dumps(schema)}"
    return f"%lark {{\n{grammar['lark_grammar']}\n}}"
