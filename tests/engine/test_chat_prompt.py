"""Chat templates decide; nothing is added to what the user gave."""

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from tests.support.chat.byte_tokenizer import tokenizer_of
from vllm_metal_lite.engine.chat_prompt import by_template, template_variables, thinking_switch

CHAT = [{"role": "user", "content": "Hello"}]
MARKS = {"<think>", "</think>"}
SHOWS = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES = {
    "thinks if asked": SHOWS
    + "{% if enable_thinking is defined and enable_thinking %}+{% endif %}",
    "thinks unless told not to": SHOWS
    + "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}",
    "of DeepSeek": SHOWS + "{% if thinking | default(false) %}+{% else %}-{% endif %}",
    "shows all": SHOWS + "{{ enable_thinking is defined }} {{ thinking is defined }} "
    "{{ return_dict is defined }} {{ tools is none }} {{ documents is none }}",
}


@pytest.mark.parametrize("marks", [set(), MARKS], ids=["no marks", "marks"])
@pytest.mark.parametrize("given", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_that_of_transformers(name, given, marks):
    """mlx-lm's wrapper sets `enable_thinking` by the vocabulary where nobody has set it."""
    plain = tokenizer_of(marks, special=False)
    plain.chat_template = TEMPLATES[name]
    text = by_template(TokenizerWrapper(plain), CHAT, True, given)
    assert text == plain.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True, **given
    )


class OwnTokenizer(PreTrainedTokenizerFast):
    """As some models' own code has it: Python renders the prompt, with another switch."""

    def apply_chat_template(self, messages, tokenize=True, thinking="unset", **others):
        return f"{messages[0]['content']} {thinking} {sorted(others)}"


def test_a_tokenizer_s_own_code_gets_the_switch_by_its_own_name_and_nothing_else():
    wrapper = TokenizerWrapper(
        OwnTokenizer(tokenizer_object=tokenizer_of(MARKS, special=False).backend_tokenizer)
    )
    assert by_template(wrapper, CHAT, True, {}) == "Hello unset ['add_generation_prompt']"
    said = by_template(wrapper, CHAT, True, {"enable_thinking": False})
    assert said == "Hello False ['add_generation_prompt']"


def test_a_renderer_of_mlx_lm_gets_nothing_else_either():
    def render(messages, **variables):
        return str(variables)

    wrapper = TokenizerWrapper(tokenizer_of(MARKS, special=False), chat_template=render)
    assert by_template(wrapper, CHAT, True, {}) == "{'add_generation_prompt': True}"


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("thinks if asked", ["enable_thinking"]),
        ("of DeepSeek", ["thinking"]),
        ("shows all", ["enable_thinking", "thinking"]),
        ("", ["enable_thinking"]),
    ],
)
def test_the_switch_has_the_names_that_the_template_reads(name, names):
    plain = tokenizer_of(MARKS, special=False)
    plain.chat_template = TEMPLATES.get(name)
    variables = template_variables(TokenizerWrapper(plain))
    assert thinking_switch(variables, False) == dict.fromkeys(names, False)
