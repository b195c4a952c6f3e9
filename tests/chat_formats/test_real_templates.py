"""Chat templates of real models: the format that they show reads the calls that they write."""

from collections import Counter
from collections.abc import Callable

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.utils.chat_template_utils import render_jinja_template

from tests.support.chat.byte_tokenizer import tokenizer_of
from tests.support.chat.real_parts import template, templates
from tests.support.chat.text import check_splits
from tests.support.chat.writers import WRITERS
from vllm_metal_lite.chat_formats.chat_format import ChatFormat
from vllm_metal_lite.chat_formats.detect import (
    ARGUMENTS,
    FORMATS,
    TOOL,
    detect,
    reads,
    written_calls,
)
from vllm_metal_lite.engine.chat_prompt import by_template
from vllm_metal_lite.server.content import function_call

USER = {"role": "user", "content": "Read it."}

MODELS = {
    "Qwen-Qwen3-4B-Instruct-2507": "hermes",
    "Qwen-Qwen3-Coder-30B-A3B-Instruct": "qwen3_coder",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "mistralai-Mistral-7B-Instruct-v0.3": "mistral_list",
    "mistralai-Ministral-3-3B-Instruct-2512": "mistral",
    "zai-org-GLM-4.5V": "glm45",
    "zai-org-GLM-5.1": "glm47",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "moonshotai-Kimi-K2-Thinking": "kimi_k2",
    "MiniMaxAI-MiniMax-M2": "minimax_m2",
    "openbmb-MiniCPM5-1B": "minicpm5",
    "tencent-Hunyuan-7B-Pretrain": "hunyuan",
    "meituan-longcat-LongCat-2.0": "longcat2",
    "LiquidAI-LFM2.5-8B-A1B-Base": "lfm2",
    "allenai-Olmo-3-7B-Instruct": "olmo3",
    "google-gemma-4-26B-A4B-it": "gemma4",
    "unsloth-functiongemma-270m-it": "function_gemma",
    "unsloth-gpt-oss-20b": "harmony",
    "ai21labs-Jamba-tiny-dev": "tool_calls_json",
    "meituan-longcat-LongCat-Flash-Chat": "longcat",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere",
}


def renderer(text: str) -> Callable[[list[dict], list[dict], bool], str]:
    """As a tokenizer with this template renders."""

    def render(messages: list[dict], tools: list[dict], generation: bool) -> str:
        how = {"bos_token": "", "eos_token": ""}
        [rendered], _ = render_jinja_template(
            [messages], tools=tools, chat_template=text, add_generation_prompt=generation, **how
        )
        return rendered

    return render


def called(text: str, chat_format: ChatFormat) -> list[str]:
    """The calls that a template writes and the format reads."""
    answers = written_calls(renderer(text), chat_format.adapt)
    return [answer for answer in answers if reads(chat_format, answer)]


@pytest.mark.parametrize("name", MODELS)
def test_a_rendered_call_is_read_under_every_split(name):
    text = template(name)
    chat_format = detect(text, renderer(text))
    assert chat_format.name == MODELS[name]
    answer = called(text, chat_format)[0]
    assert check_splits(chat_format, answer, tools=[TOOL]).called == [(TOOL.name, ARGUMENTS)]


@pytest.mark.long
def test_a_format_reads_what_its_template_writes_or_there_is_none():
    """Others write forms of their own.  Some cannot be rendered here, so their texts decide."""
    counts, unread = Counter(), []
    for name, text in templates().items():
        if "tool_calls" not in text:
            continue
        chat_format = detect(text, renderer(text))
        if chat_format.has_calls and not called(text, chat_format):
            unread.append(name)
            answers = written_calls(renderer(text), chat_format.adapt)
            assert not any(ARGUMENTS["path"] in answer for answer in answers), name
        counts[chat_format.name if chat_format.has_calls else "none"] += 1
    assert counts.total() == 389
    assert len(unread) <= 10, unread
    assert counts["none"] <= 39, counts


@pytest.mark.long
def test_the_order_of_the_formats_does_not_matter():
    """Of the formats that fit a template, one has the longest signs."""
    for name, text in templates().items():
        shown = text + "".join(written_calls(renderer(text)))
        lengths = [
            len("".join(form.signs))
            for form in FORMATS.values()
            if form.signs and all(sign in shown for sign in form.signs)
            if called(text, form) or not written_calls(renderer(text), form.adapt)
        ]
        assert lengths.count(max(lengths, default=0)) <= 1, name


@pytest.mark.long
@pytest.mark.parametrize("marks", [set(), {"<think>", "</think>"}], ids=["no marks", "marks"])
def test_a_prompt_is_that_of_transformers_whatever_the_vocabulary_is(marks):
    plain = tokenizer_of(marks, special=False)
    wrapper, equal = TokenizerWrapper(plain), 0
    for name, text in templates().items():
        plain.chat_template = text
        try:
            how = {"tokenize": False, "add_generation_prompt": True}
            expected = plain.apply_chat_template([USER], **how)
        except Exception:  # templates raise any error
            continue
        assert by_template(wrapper, [USER], True, {}) == expected, name
        equal += 1
    assert equal > 700


@pytest.mark.long
def test_a_template_that_renders_calls_renders_malformed_ones_too():
    """Clients send an answer's calls back with the next request."""
    taken = [text for text in templates().values() if takes(text, '{"path": "x"}')]
    assert len(taken) > 350
    assert all(takes(text, '{"path": "x" oops}') for text in taken)


def takes(text: str, arguments: str) -> bool:
    call = function_call({"name": TOOL.name, "id": "abcdefghi"}, "id", arguments, "")
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        return bool(renderer(text)(messages, [TOOL.for_template()], True))
    except Exception:  # templates raise any error
        return False


def refuse(messages, tools, generation):
    raise ValueError


# Their texts are those of another format.
@pytest.mark.parametrize(
    ("name", "expected"), [("tencent-Hy-MT2-30B-A3B", "thinking"), ("openbmb-MiniCPM3-4B", "plain")]
)
def test_a_format_that_does_not_read_the_template_s_call_is_not_chosen(name, expected):
    text = template(name)
    assert detect(text, refuse).has_calls
    assert detect(text, renderer(text)).name == expected


def test_a_format_that_is_not_chosen_does_not_change_the_call_that_others_read():
    def render(messages, tools, generation):
        [call] = messages[-1].get("tool_calls", [None])
        if call is None:
            return ""
        if call["id"].startswith("functions."):  # by Kimi's `adapt`
            return TOOL.name
        return WRITERS["hermes"]([(TOOL.name, ARGUMENTS)])

    text = "<|tool_calls_section_begin|><|tool_call_argument_begin|><tool_call>"
    assert detect(text, render).name == "hermes"


@pytest.mark.parametrize("name", ["LiquidAI-LFM2.5-350M", "LiquidAI-LFM2-1.2B"])
def test_a_template_that_writes_no_calls_leaves_it_to_the_vocabulary(name):
    text = template(name)
    tokens = {"<|tool_call_start|>", "<|tool_call_end|>"}
    assert detect(text, renderer(text), tokens).name == "lfm2"
    assert not detect(text, renderer(text)).has_calls


def test_marks_of_thoughts_in_the_vocabulary_are_enough():
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert detect(text, renderer(text), {"<think>", "</think>"}).name == "thinking"
    assert detect(text, renderer(text)).name == "plain"


def test_a_template_that_shows_no_tools_has_no_calls():
    text = template("HuggingFaceTB-SmolLM3-3B")
    tokens = {"<|tool_call_start|>", "<|tool_call_end|>"}
    assert detect(text, renderer(text), tokens).name == "thinking"


@pytest.mark.parametrize("name", ["meta-llama-Llama-3.1-8B-Instruct", "unsloth-gpt-oss-20b"])
def test_templates_that_take_one_call_a_message(name):
    text = template(name)
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "read", "arguments": {"path": i}}}
        for i in "12"
    ]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"result {i}"} for i in "12"]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    messages = detect(text, renderer(text)).adapt([USER, said, *results])
    whole = renderer(text)(messages, [TOOL.for_template()], True)
    places = [whole.index(part) for part in ('"path": "1"', "result 1", '"path": "2"', "result 2")]
    assert places == sorted(places)
