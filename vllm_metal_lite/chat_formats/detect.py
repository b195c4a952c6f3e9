"""Finds a model's format in its chat template, and tests it on a call that the template writes."""

from collections.abc import Container, Sequence

from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.gemma import FUNCTION_GEMMA, GEMMA_4
from vllm_metal_lite.chat_formats.harmony import HARMONY
from vllm_metal_lite.chat_formats.json_markers import (
    COHERE,
    GRANITE_3,
    HERMES,
    LLAMA_3,
    LONGCAT,
    NEMOTRON,
    TOOL_CALLS,
)
from vllm_metal_lite.chat_formats.json_sections import DEEPSEEK_V3, DEEPSEEK_V3_1, HUNYUAN, KIMI_K2
from vllm_metal_lite.chat_formats.mistral import MISTRAL, MISTRAL_LIST
from vllm_metal_lite.chat_formats.probe import Render, reads, shows_tools, written_calls
from vllm_metal_lite.chat_formats.pythonic import LFM2, OLMO_3
from vllm_metal_lite.chat_formats.tagged import (
    DEEPSEEK_V3_2,
    DEEPSEEK_V4,
    GLM_4_5,
    GLM_4_7,
    LONGCAT_2,
    MINICPM_5,
    MINIMAX_M2,
    QWEN_XML,
    SEED_OSS,
)

PLAIN = ChatFormat("plain", thoughts=None)
THINKING = ChatFormat("thinking")

# The first format whose texts are all in the template, or in a call that the template writes.
_SIGNS: Sequence[tuple[ChatFormat, tuple[str, ...]]] = (
    (HARMONY, ("<|channel|>", "<|message|>", "analysis")),
    (MINIMAX_M2, ("<minimax:tool_call>", "<invoke name=")),
    (DEEPSEEK_V4, ("｜DSML｜", "tool_calls>")),
    (DEEPSEEK_V3_2, ("｜DSML｜", "function_calls>")),
    (DEEPSEEK_V3, ("<｜tool▁calls▁begin｜>", "```json")),
    (DEEPSEEK_V3_1, ("<｜tool▁calls▁begin｜>",)),
    (KIMI_K2, ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")),
    (GEMMA_4, ("<|tool_call>", '<|"|>')),
    (FUNCTION_GEMMA, ("<start_function_call>", "<escape>")),
    (LFM2, ("<|tool_call_start|>",)),
    (LFM2, ("<|tool_list_start|>",)),
    (MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL_LIST, ("[TOOL_CALLS]",)),
    (LONGCAT_2, ("<longcat_arg_key>",)),
    (GLM_4_7, ("<tool_call>{function-name}<arg_key>",)),
    (GLM_4_5, ("<tool_call>", "<arg_key>")),
    (SEED_OSS, ("<seed:tool_call>", "<function=")),
    (QWEN_XML, ("<function=", "<parameter=")),
    (COHERE, ("<|START_ACTION|>", "tool_name")),
    (LONGCAT, ("<longcat_tool_call>", '"arguments"')),
    (NEMOTRON, ("<TOOLCALL>",)),
    (GRANITE_3, ("<|tool_call|>", "JSON list")),
    (OLMO_3, ("<functions>", "<function_calls>")),
    (TOOL_CALLS, ("<tool_calls>[",)),
    (LLAMA_3, ('"parameters": ', "<|start_header_id|>", "ipython")),
    (HUNYUAN, ("<tool_calls>", "<tool_call>", "```json")),
    (MINICPM_5, ("<function name=", "<param name=")),
    (HERMES, ("<tool_call>",)),
    (TOOL_CALLS, ("<tool_calls>", "</tool_calls>")),
)
# Some templates of LFM2 list tools but write no calls.  Then the vocabulary decides.
_LFM2_TOKENS = "<|tool_call_start|>", "<|tool_call_end|>"

FORMATS: dict[str, ChatFormat] = {
    f.name: f for f in (PLAIN, THINKING, *(shown for shown, _ in _SIGNS))
}


def detect(template: str, render: Render, vocabulary: Container[str] = ()) -> ChatFormat:
    """The format of a chat template; "thinking" or "plain", which have no calls, if none is known.

    render: by the template.  A format that does not read the call that the template writes is not
    the model's, whatever texts the template has.  vocabulary: tokens with a meaning, such
    as marks of thoughts.
    """
    written = written_calls(render)
    shown = template + "".join(written)
    for chat_format, texts in _SIGNS:
        if all(text in shown for text in texts):
            adapt = chat_format.adapt
            answers = written if adapt is None else written_calls(render, adapt)
            if not answers or any(reads(chat_format, answer) for answer in answers):
                return chat_format
    has_tokens = all(token in vocabulary for token in _LFM2_TOKENS)
    if has_tokens and not written and shows_tools(render):
        return LFM2
    return THINKING if "</think>" in shown or "</think>" in vocabulary else PLAIN
