"""What templates take; system messages in mid-conversation, under real templates."""

from itertools import pairwise
from unittest.mock import Mock

import pytest
from mlx_lm.utils import load_tokenizer

from tests.support.chat import real_parts
from tests.support.server.kit import model_text
from vllm_metal_lite.server import templates
from vllm_metal_lite.server.conversations import ChatRequest, render_prompt
from vllm_metal_lite.server.offload import Abandoned
from vllm_metal_lite.server.templates import Template, probe

SYSTEM = {"role": "system", "content": "Be brief."}
LATE = {"role": "system", "content": "It is late."}
USER, OTHER = {"role": "user", "content": "Hello"}, {"role": "user", "content": "Go on"}
ANSWER = {"role": "assistant", "content": "Hi"}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return load_tokenizer(real_parts.tokenizer_folder(tmp_path_factory.mktemp("qwen")))


@pytest.fixture
def with_template(qwen, monkeypatch):
    """A real tokenizer with a template by name."""

    def use(name: str):
        monkeypatch.setattr(qwen._tokenizer, "chat_template", real_parts.template(name))
        return probe(qwen)

    return use


def text_of(template, *messages, generation=True) -> str:
    return template.render(messages, generation, {})


@pytest.mark.parametrize(
    ("name", "system_in_middle", "reasoning"),
    [
        ("Qwen-Qwen3-4B-Instruct-2507", "native", ""),
        ("Qwen-Qwen3-0.6B", "native", "reasoning_content"),
        ("Qwen3.5-4B", "inserted", "reasoning_content"),
        ("GLM-4.6", "native", "reasoning_content"),
        ("meta-llama-Llama-3.1-8B-Instruct", "native", ""),
        ("MiniMax-M2", "inserted", "reasoning_content"),
        ("openai-gpt-oss-120b", "in user turn", "thinking"),
    ],
)
def test_what_templates_take(with_template, name, system_in_middle, reasoning):
    template = with_template(name)
    assert (template.system_in_middle, template.reasoning) == (system_in_middle, reasoning)


def test_a_system_message_is_written_in_its_place(with_template):
    template = with_template("Qwen3.5-4B")
    text = text_of(template, SYSTEM, USER, LATE, ANSWER, OTHER, LATE)
    turn = "<|im_start|>system\nIt is late.<|im_end|>\n"
    assert text.count(turn) == 2
    first, second, rest = text.split(turn)
    assert first.endswith("<|im_start|>user\nHello<|im_end|>\n")
    assert second.endswith("<|im_start|>user\nGo on<|im_end|>\n")
    assert first + second + rest == text_of(template, SYSTEM, USER, ANSWER, OTHER)
    assert rest.startswith("<|im_start|>assistant\n")


def test_rendering_ends_if_the_client_has_left(with_template, monkeypatch):
    template = with_template("Qwen3.5-4B")
    monkeypatch.setattr(templates, "check_wanted", Mock(side_effect=[None, Abandoned]))
    with pytest.raises(Abandoned):
        text_of(template, SYSTEM, USER, LATE, ANSWER, OTHER, LATE)


@pytest.mark.parametrize("name", ["Qwen3.5-4B", "MiniMax-M2", "openai-gpt-oss-120b", "GLM-4.6"])
def test_a_conversation_with_late_system_messages_only_grows(with_template, name):
    """What was rendered once is a prefix of all that follows."""
    template = with_template(name)
    messages = [SYSTEM, USER, LATE]
    texts = []
    for _ in range(3):
        texts.append(text_of(template, *messages, generation=False))
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "f", "content": "1"},
            LATE,
        ]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter.removesuffix("<|im_end|>\n").removesuffix("<|end|>"))


def test_templates_without_system_turns_get_them_as_marked_text(with_template):
    template = with_template("openai-gpt-oss-120b")
    text = text_of(template, SYSTEM, USER, LATE)
    assert "Hello\n\n<system>\nIt is late.\n</system>" in text


def test_tokens_of_a_prompt_with_a_late_system_message(with_template):
    tokenizer = with_template("Qwen3.5-4B").tokenizer
    prompt = render_prompt(model_text(tokenizer), ChatRequest([SYSTEM, USER, LATE]), True)
    assert "It is late." in tokenizer.decode(prompt.token_ids)
    assert all(0 < at < len(prompt.token_ids) for at in prompt.checkpoints)


def test_thoughts_stand_where_the_template_looks_for_them():
    message = {"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": None}
    said = {"role": "assistant", "content": "a"}
    assert Template(None, "native", "thinking").prepare([message]) == [{**said, "thinking": "b"}]
    assert Template(None, "native").prepare([message]) == [said]


def test_names_of_variables():
    plain = Template(None, "native", variables=frozenset({"thinking"}))
    assert plain.thinking(None, None) == {}
    assert plain.thinking(True, "max") == {"thinking": True, "reasoning_effort": "high"}
    assert plain.thinking(None, "none") == {"thinking": False}
    found = Template(None, "native").thinking(False, "low")
    assert found == {"enable_thinking": False, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("name", "effort", "found"),
    [
        ("unsloth-DeepSeek-V4-Flash", "max", {"reasoning_effort": "max"}),
        ("openai-gpt-oss-120b", "max", {"reasoning_effort": "high"}),
        (
            "mistralai-Mistral-Small-4-119B-2603",
            "none",
            {"enable_thinking": False, "reasoning_effort": "none"},
        ),
        ("unsloth-DeepSeek-V4-Flash", "none", {"enable_thinking": False, "thinking": False}),
    ],
)
def test_an_effort_that_the_template_names_is_given_as_it_is(with_template, name, effort, found):
    assert with_template(name).thinking(None, effort) == found


@pytest.mark.long
@pytest.mark.parametrize("one_in", [8, pytest.param(1, marks=pytest.mark.thorough)])
def test_every_template_can_be_probed(qwen, monkeypatch, one_in):
    for name, source in sorted(real_parts.templates().items())[::one_in]:
        monkeypatch.setattr(qwen._tokenizer, "chat_template", source)
        assert probe(qwen).system_in_middle in ("native", "inserted", "in user turn"), name
