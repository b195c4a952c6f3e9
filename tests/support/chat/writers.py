"""Calls as models of each format write them.  Written by hand, beside the readers."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]
Writer = Callable[[Calls], str]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _in_cdata(value: Any) -> str:
    is_raw = isinstance(value, str) and not {"<", "&", "\n"}.isdisjoint(value)
    return f"<![CDATA[{value}]]>" if is_raw else _text(value)


def _fill(form: str, **values: str) -> str:
    return re.sub("|".join(values), lambda match: values[match[0]], form)


def _calls(
    call: str,
    between: str = "",
    start: str = "",
    end: str = "",
    *,
    pair: str = "",
    between_pairs: str = "",
    write: Callable[[Any], str] = _text,
) -> Writer:
    """call: of each call; NAME, JSON (all arguments) and PAIRS are replaced by its parts.

    pair: of each argument: KEY, VALUE (by `write`) and IS_TEXT.
    """

    def written(name: str, arguments: dict[str, Any]) -> str:
        pairs = (
            _fill(pair, KEY=k, VALUE=write(v), IS_TEXT=_json(isinstance(v, str)))
            for k, v in arguments.items()
        )
        return _fill(call, NAME=name, JSON=_json(arguments), PAIRS=between_pairs.join(pairs))

    return lambda calls: start + between.join(written(*c) for c in calls) + end


def _xml(prefix: str = "") -> Writer:
    function = "<function=NAME>\nPAIRS</function>"
    call = f"<{prefix}tool_call>\n{function}\n</{prefix}tool_call>"
    return _calls(call, "\n", pair="<parameter=KEY>\nVALUE\n</parameter>\n")


def _glm(line_break: str, prefix: str = "") -> Writer:
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"
    call = f"<{prefix}tool_call>NAME{line_break}PAIRS</{prefix}tool_call>"
    pair = f"<{key}>KEY</{key}>{line_break}<{value}>VALUE</{value}>{line_break}"
    return _calls(call, "\n", pair=pair)


def _deepseek(call: str, between: str) -> Writer:
    call = f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"
    return _calls(call, between, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _dsml(section: str) -> Writer:
    call = '<｜DSML｜invoke name="NAME">\nPAIRS</｜DSML｜invoke>\n'
    pair = '<｜DSML｜parameter name="KEY" string="IS_TEXT">VALUE</｜DSML｜parameter>\n'
    return _calls(call, "", f"<｜DSML｜{section}>\n", f"</｜DSML｜{section}>", pair=pair)


def _gemma(start: str, end: str, quote: str) -> Writer:
    def write(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{write(value[k])}" for k in sorted(value)) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(write, value)) + "]"
        return _json(value)

    return lambda calls: "".join(f"{start}call:{name}{write(a)}{end}" for name, a in calls)


_OBJECT = '{"name": "NAME", "arguments": JSON}'
WRITERS: dict[str, Writer] = {
    "hermes": _calls(f"<tool_call>\n{_OBJECT}\n</tool_call>", "\n"),
    "qwen3_coder": _xml(),
    "seed_oss": _xml("seed:"),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "longcat2": _glm("\n", "longcat_"),
    "llama3_json": _calls('{"name": "NAME", "parameters": JSON}', "; ", "<|python_tag|>"),
    "mistral": _calls("[TOOL_CALLS]NAME[ARGS]JSON"),
    "mistral_list": _calls(_OBJECT, ", ", "[TOOL_CALLS][", "]"),
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>NAME\n```json\nJSON\n```", "\n"),
    "deepseek_v31": _deepseek("NAME<｜tool▁sep｜>JSON", ""),
    "kimi_k2": _calls(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON<|tool_call_end|>",
        start="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    "minimax_m2": _calls(
        '<invoke name="NAME">\nPAIRS</invoke>\n',
        start="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        pair='<parameter name="KEY">VALUE</parameter>\n',
    ),
    "minicpm5": _calls(
        '<function name="NAME">PAIRS</function>',
        pair='<param name="KEY">VALUE</param>',
        write=_in_cdata,
    ),
    "hunyuan": _calls(
        "<tool_call>NAME\n```json\nJSON\n```</tool_call>", "", "<tool_calls>", "</tool_calls>"
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "lfm2": _calls(
        "NAME(PAIRS)",
        ", ",
        "<|tool_call_start|>[",
        "]<|tool_call_end|>",
        pair="KEY=VALUE",
        between_pairs=", ",
        write=repr,
    ),
    "olmo3": _calls(
        "NAME(PAIRS)",
        "\n",
        "<function_calls>",
        "</function_calls>",
        pair="KEY=VALUE",
        between_pairs=", ",
        write=_json,
    ),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "harmony": _calls(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>",
        "<|start|>assistant",
    ),
    "tool_calls_json": _calls(_OBJECT, ", ", "<tool_calls>[", "]</tool_calls>"),
    "nemotron_json": _calls(_OBJECT, ", ", "<TOOLCALL>[", "]</TOOLCALL>"),
    "granite": _calls(_OBJECT, ", ", "<|tool_call|>[", "]"),
    "longcat": _calls(f"<longcat_tool_call>\n{_OBJECT}\n</longcat_tool_call>", "\n"),
    "cohere": _calls(
        '\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": JSON}',
        ",",
        "<|START_ACTION|>[",
        "\n]<|END_ACTION|>",
    ),
}
# Formats whose strings stand as they are: these marks cannot be in them.
RAW_STRINGS = {
    "qwen3_coder": "</parameter>", "seed_oss": "</parameter>",
    "glm45": "</arg_value>", "glm47": "</arg_value>",
    "longcat2": "</longcat_arg_value>", "minicpm5": "]]>",
    "minimax_m2": "</parameter>", "deepseek_v32": "</｜DSML｜parameter>",
    "deepseek_v4": "</｜DSML｜parameter>", "gemma4": '<|"|>', "function_gemma": "<escape>",
}  # fmt: skip
