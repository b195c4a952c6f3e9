"""Finds a model's format in its chat template, and tests it on a call that the template writes."""

from collections.abc import Container, Sequence

from vllm_metal_lite.chat_formats import (
    gemma,
    harmony,
    json_markers,
    json_sections,
    mistral,
    pythonic,
    tagged,
)
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.probe import Render, reads, shows_tools, written_calls

PLAIN = ChatFormat("plain", thoughts=None)
THINKING = ChatFormat("thinking")

# The first format whose texts are all in the template, or in a call that the template writes.
_SIGNS: Sequence[tuple[ChatFormat, tuple[str, ...]]] = (
    (harmony.HARMONY, ("<|channel|>", "<|message|>", "analysis")),
    (tagged.MINIMAX_M2, ("<minimax:tool_call>", "<invoke name=")),
    (tagged.DEEPSEEK_V4, ("｜DSML｜", "tool_calls>")),
    (tagged.DEEPSEEK_V3_2, ("｜DSML｜", "function_calls>")),
    (json_sections.DEEPSEEK_V3, ("<｜tool▁calls▁begin｜>", "```json")),
    (json_sections.DEEPSEEK_V3_1, ("<｜tool▁calls▁begin｜>",)),
    (json_sections.KIMI_K2, ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")),
    (gemma.GEMMA_4, ("<|tool_call>", '<|"|>')),
    (gemma.FUNCTION_GEMMA, ("<start_function_call>", "<escape>")),
    (pythonic.LFM2, ("<|tool_call_start|>",)),
    (pythonic.LFM2, ("<|tool_list_start|>",)),
    (mistral.MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    (mistral.MISTRAL_LIST, ("[TOOL_CALLS]",)),
    (tagged.LONGCAT_2, ("<longcat_arg_key>",)),
    (tagged.GLM_4_7, ("<tool_call>{function-name}<arg_key>",)),
    (tagged.GLM_4_5, ("<tool_call>", "<arg_key>")),
    (tagged.SEED_OSS, ("<seed:tool_call>", "<function=")),
    (tagged.QWEN_XML, ("<function=", "<parameter=")),
    (json_markers.COHERE, ("<|START_ACTION|>", "tool_name")),
    (json_markers.LONGCAT, ("<longcat_tool_call>", '"arguments"')),
    (json_markers.NEMOTRON, ("<TOOLCALL>",)),
    (json_markers.GRANITE_3, ("<|tool_call|>", "JSON list")),
    (pythonic.OLMO_3, ("<functions>", "<function_calls>")),
    (json_markers.TOOL_CALLS, ("<tool_calls>[",)),
    (json_markers.LLAMA_3, ('"parameters": ', "<|start_header_id|>", "ipython")),
    (json_sections.HUNYUAN, ("<tool_calls>", "<tool_call>", "```json")),
    (tagged.MINICPM_5, ("<function name=", "<param name=")),
    (json_markers.HERMES, ("<tool_call>",)),
    (json_markers.TOOL_CALLS, ("<tool_calls>", "</tool_calls>")),
)
# Some templates of LFM2 list tools but write no calls.  Then the vocabulary decides.
_LFM2_TOKENS = "<|tool_call_start|>", "<|tool_call_end|>"

FORMATS: dict[str, ChatFormat] = {
    f.name: f for f in (PLAIN, THINKING, *(shown for shown, _ in _SIGNS))
}


def detect(template: str, render: Render, vocabulary: Container[str] = ()) -> ChatFormat:
    """The format of a chat template; "thinking" or "plain", which have no calls, if none is known.

    render: by the template.  A format is chosen only if it reads the call that the template writes.
    vocabulary: tokens with a meaning, such as marks of thoughts.
    """
    written = written_calls(render)
    shown = template + "".join(written)
    for chat_format, texts in _SIGNS:
        if all(text in shown for text in texts):
            answers = written_calls(render, chat_format.adapt)
            if not answers or any(reads(chat_format, answer) for answer in answers):
                return chat_format
    has_tokens = all(token in vocabulary for token in _LFM2_TOKENS)
    if has_tokens and not written and shows_tools(render):
        return pythonic.LFM2
    return THINKING if "</think>" in shown or "</think>" in vocabulary else PLAIN
