"""Calls as models of each format write them.  Written by hand, beside the readers."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


def _qwen_xml(calls: Calls, prefix: str = "") -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        parameters = "".join(
            f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in arguments.items()
        )
        function = f"<function={name}>\n{parameters}</function>"
        return f"<{prefix}tool_call>\n{function}\n</{prefix}tool_call>"

    return "\n".join(call(*c) for c in calls)


def _glm(line_break: str, prefix: str = "") -> Callable[[Calls], str]:
    key, value = f"{prefix}arg_key", f"{prefix}arg_value"

    def call(name: str, arguments: dict[str, Any]) -> str:
        pairs = "".join(
            f"<{key}>{k}</{key}>{line_break}<{value}>{_text(v)}</{value}>{line_break}"
            for k, v in arguments.items()
        )
        return f"<{prefix}tool_call>{name}{line_break}{pairs}</{prefix}tool_call>"

    return lambda calls: "\n".join(call(*c) for c in calls)


def _llama(calls: Calls) -> str:
    written = (f'{{"name": "{name}", "parameters": {_json(a)}}}' for name, a in calls)
    return "<|python_tag|>" + "; ".join(written)


def _mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(a)}" for name, a in calls)


def _mistral_list(calls: Calls) -> str:
    written = (f'{{"name": "{name}", "arguments": {_json(a)}}}' for name, a in calls)
    return f"[TOOL_CALLS][{', '.join(written)}]"


def _deepseek(head: str, middle: str, tail: str, between: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        written = (
            f"<｜tool▁call▁begin｜>{head}{name}{middle}{_json(a)}{tail}<｜tool▁call▁end｜>"
            for name, a in calls
        )
        return f"<｜tool▁calls▁begin｜>{between.join(written)}<｜tool▁calls▁end｜>"

    return write


def _kimi(calls: Calls) -> str:
    written = (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{_json(a)}"
        "<|tool_call_end|>"
        for name, a in calls
    )
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def _minimax(calls: Calls) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        parameters = "".join(
            f'<parameter name="{k}">{_text(v)}</parameter>\n' for k, v in arguments.items()
        )
        return f'<invoke name="{name}">\n{parameters}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(call(*c) for c in calls)}</minimax:tool_call>"


def _minicpm5(calls: Calls) -> str:
    def value(value: Any) -> str:
        is_raw = isinstance(value, str) and not {"<", "&", "\n"}.isdisjoint(value)
        return f"<![CDATA[{value}]]>" if is_raw else _text(value)

    def call(name: str, arguments: dict[str, Any]) -> str:
        pairs = (f'<param name="{k}">{value(v)}</param>' for k, v in arguments.items())
        return f'<function name="{name}">{"".join(pairs)}</function>'

    return "".join(call(*c) for c in calls)


def _hunyuan(calls: Calls) -> str:
    written = (f"<tool_call>{name}\n```json\n{_json(a)}\n```</tool_call>" for name, a in calls)
    return f"<tool_calls>{''.join(written)}</tool_calls>"


def _dsml(section: str) -> Callable[[Calls], str]:
    def call(name: str, arguments: dict[str, Any]) -> str:
        parameters = "".join(
            f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{_text(v)}'
            "</｜DSML｜parameter>\n"
            for k, v in arguments.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n'

    return lambda calls: (
        f"<｜DSML｜{section}>\n{''.join(call(*c) for c in calls)}</｜DSML｜{section}>"
    )


def _lfm2(calls: Calls) -> str:
    written = (
        f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
        for name, arguments in calls
    )
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


def _olmo(calls: Calls) -> str:
    written = (
        f"{name}({', '.join(f'{k}={_json(v)}' for k, v in arguments.items())})"
        for name, arguments in calls
    )
    return "<function_calls>" + "\n".join(written) + "</function_calls>"


def _gemma(start: str, end: str, quote: str) -> Callable[[Calls], str]:
    def value(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{write(value[k])}" for k in sorted(value)) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(write, value)) + "]"
        return _json(value)

    write = value
    return lambda calls: "".join(f"{start}call:{name}{write(a)}{end}" for name, a in calls)


def _harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(a)}<|call|>"
        for name, a in calls
    )


def _list(start: str, end: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        written = (f'{{"name": "{name}", "arguments": {_json(a)}}}' for name, a in calls)
        return f"{start}[{', '.join(written)}]{end}"

    return write


def _longcat(calls: Calls) -> str:
    return "\n".join(
        f"<longcat_tool_call>\n{_hermes([call])[12:-13]}\n</longcat_tool_call>" for call in calls
    )


def _cohere(calls: Calls) -> str:
    written = (
        f'\n    {{"tool_call_id": "0", "tool_name": "{name}", "parameters": {_json(a)}}}'
        for name, a in calls
    )
    return f"<|START_ACTION|>[{','.join(written)}\n]<|END_ACTION|>"


WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen_xml,
    "seed_oss": partial(_qwen_xml, prefix="seed:"),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "longcat2": _glm("\n", "longcat_"),
    "llama3_json": _llama,
    "mistral": _mistral,
    "mistral_list": _mistral_list,
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),
    "deepseek_v31": _deepseek("", "<｜tool▁sep｜>", "", ""),
    "kimi_k2": _kimi,
    "minimax_m2": _minimax,
    "minicpm5": _minicpm5,
    "hunyuan": _hunyuan,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "lfm2": _lfm2,
    "olmo3": _olmo,
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "harmony": _harmony,
    "tool_calls_json": _list("<tool_calls>", "</tool_calls>"),
    "nemotron_json": _list("<TOOLCALL>", "</TOOLCALL>"),
    "granite": _list("<|tool_call|>", ""),
    "longcat": _longcat,
    "cohere": _cohere,
}
# Formats whose strings stand as they are: these marks cannot be in them.
RAW_STRINGS = {
    "qwen3_coder": "</parameter>", "seed_oss": "</parameter>",
    "glm45": "</arg_value>", "glm47": "</arg_value>",
    "longcat2": "</longcat_arg_value>", "minicpm5": "]]>",
    "minimax_m2": "</parameter>", "deepseek_v32": "</｜DSML｜parameter>",
    "deepseek_v4": "</｜DSML｜parameter>", "gemma4": '<|"|>', "function_gemma": "<escape>",
}  # fmt: skip
