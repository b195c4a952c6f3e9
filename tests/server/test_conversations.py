"""Conversations become prompts whose checkpoints later prompts start from."""

import asyncio
import shutil

import httpx
import pytest

from tests.support.chat.text import gather
from tests.support.models import tiny_models
from tests.support.server.kit import model_text, serving, user
from vllm_metal_lite import LLM, SamplingParams
from vllm_metal_lite.chat_formats.json_markers import HERMES
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.model.files.find import DEMO_PATH
from vllm_metal_lite.model.files.tokenizer import load_tokenizer_only
from vllm_metal_lite.server.conversations import ChatRequest, render_prompt
from vllm_metal_lite.server.served_model import ModelSpec
from vllm_metal_lite.server.turns import prepare

SYSTEM = {"role": "system", "content": "You answer in short sentences. " * 12}
BLOCK = 16
GO_ON = {"template": {"continue_final_message": True}, "add_generation_prompt": False}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def tokenizer():
    return load_tokenizer_only("demo")


def render(tokenizer, *messages, with_checkpoints=True, **fields):
    conversation = ChatRequest(messages, **fields)
    return render_prompt(model_text(tokenizer), conversation, with_checkpoints)


def shown(tokenizer, prompt):
    """The text before each checkpoint."""
    return [tokenizer.decode(prompt.token_ids[:position]) for position in prompt.checkpoints]


def test_checkpoints_lie_behind_the_system_the_last_question_and_the_last_message(tokenizer):
    messages = [SYSTEM, user("Who are you?"), assistant("A lamp."), user("And then?")]
    system, question, end = shown(tokenizer, render(tokenizer, *messages))
    # Each is one token before the texts differ: that token may be part of a longer one.
    before = f"<|system|>{SYSTEM['content']}<|end|>"
    assert system == before
    said = f"{before}<|user|>Who are you?<|end|><|assistant|>A lamp.<|end|>"
    assert question == said
    assert end == f"{said}<|user|>And then?"


def test_a_loop_of_calls_has_a_checkpoint_at_its_end(tokenizer):
    messages = [user("Do."), assistant("I do."), {"role": "tool", "content": "Done."}]
    *_, end = shown(tokenizer, render(tokenizer, *messages))
    assert end.endswith("Done.")


def test_other_models_get_none(tokenizer):
    token_ids = render(tokenizer, SYSTEM, user("hi")).token_ids
    prompt = render(tokenizer, SYSTEM, user("hi"), with_checkpoints=False)
    assert (prompt.token_ids, prompt.checkpoints) == (token_ids, ())


def test_an_answer_to_be_gone_on_with(tokenizer):
    prompt = render(tokenizer, SYSTEM, user("hi"), assistant("Well"), **GO_ON)
    assert len(shown(tokenizer, prompt)) == 1  # no user is before the system prompt


def test_a_template_that_thinks(tokenizer):
    """The next turn's prompt has no thoughts, so it parts from this one before they begin."""
    tokenizer._tokenizer.chat_template = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ raise_exception('no user') }}{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'assistant' and loop.last %}<think>{% endif %}{{ m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    )
    prompt = render(tokenizer, SYSTEM, user("a"), assistant("b"), user("c d"))
    system, question, end = shown(tokenizer, prompt)
    assert system.endswith("<|end|>")
    assert question.endswith("<|assistant|>b<|end|>")
    assert end.endswith("<|user|>c d")


# The last answer's thoughts are open, or they are closed where the message has some.
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think>"
    "{% if m.reasoning_content %}{{ m.reasoning_content }}</think>{% endif %}{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "how", "in_reasoning", "may_think"),
    [
        ([], {}, False, True),
        ([], {"enable_thinking": True}, True, True),
        ([assistant("Well")], GO_ON, True, True),
        ([assistant("</think>Well")], GO_ON, False, False),
        ([assistant("Well") | {"reasoning_content": "Hm"}], GO_ON, False, False),
        ([assistant("<think>Well") | {"reasoning_content": "Hm"}], GO_ON, True, True),
    ],
)
def test_the_rendered_prompt_tells_whether_an_answer_goes_on_within_thoughts(
    tokenizer, messages, how, in_reasoning, may_think
):
    tokenizer._tokenizer.chat_template = THINKS
    model = model_text(tokenizer)
    conversation = ChatRequest([user("What does <think> do?"), *messages], **how)
    params = SamplingParams(structured_outputs={"json_object": True})
    turn = asyncio.run(prepare(model, conversation, params))
    assert turn.make_parser.keywords["in_reasoning"] == in_reasoning
    assert (turn.params.thinking is not None) == may_think


def test_a_template_that_refuses_other_conversations_costs_checkpoints_only(tokenizer):
    tokenizer._tokenizer.chat_template = (
        "{% if messages | length != 3 %}{{ raise_exception('three') }}{% endif %}"
        "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    three = [user("a"), assistant("b"), user("c d")]
    assert len(render(tokenizer, *three)[1]) == 2
    with pytest.raises(RequestError, match="three"):
        render(tokenizer, *three, user("d"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A server whose model has recurrent layers, and the demo's tokenizer and template."""
    path = tiny_models.write_folder(tmp_path_factory.mktemp("mixed"), "qwen3_next", vocab_size=2048)
    for name in "tokenizer.json", "tokenizer_config.json":
        shutil.copy(DEMO_PATH / name, path)
    with serving([ModelSpec("hybrid", str(path))]) as running:
        yield running, LLM(str(path), num_blocks=256)


def ask(running, *messages):
    """The number of cached tokens, and the answer."""
    body = {"messages": list(messages), "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    reply = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).json()
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, reply["choices"][0]["message"]["content"]


def test_recurrent_models_find_states_where_conversations_part(hybrid, tokenizer):
    """Their greedy answers are those of the embedded engine."""
    running, llm = hybrid
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def embedded(*messages):
        return llm.chat([list(messages)], greedy)[0].outputs[0].text

    def prefix(*messages):
        """Tokens that are cached behind these messages, at least."""
        token_ids = render(tokenizer, *messages, add_generation_prompt=False).token_ids
        return (len(token_ids) - 1) // BLOCK * BLOCK

    question = user("Tell me about a lantern. " * 5)
    cached, answer = ask(running, SYSTEM, question)
    assert (cached, answer) == (0, embedded(SYSTEM, question))
    # Another user behind the same system prompt.
    cached, _ = ask(running, SYSTEM, user("Name a river."))
    assert cached >= prefix(SYSTEM) > 0
    # The next turn.
    turn = SYSTEM, question, assistant(answer)
    cached, second = ask(running, *turn, user("And then? " * 9))
    assert second == embedded(*turn, user("And then? " * 9))
    assert cached >= prefix(SYSTEM, question)
    # The last question, asked in other words.
    cached, _ = ask(running, *turn, user("Why?"))
    assert cached >= prefix(*turn)


RUN = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
WORD = {"regex": ".*"}


@pytest.mark.parametrize(
    ("mode", "is_strict", "form", "how", "answer", "num_calls"),
    [
        ("auto", False, None, {}, f"<think>{RUN}</think>{RUN}", 2),
        ("auto", True, None, {}, f"<think>{RUN}</think>{RUN}", 1),
        ("required", False, None, {}, f"<think>{RUN}</think>{RUN}", 1),
        ("auto", False, {"json_object": True}, {}, RUN, 1),
        ("auto", False, {"json_object": True}, {}, f'{{"a": "{RUN}"}}', 0),
        ("auto", False, WORD, {}, RUN, 0),
        ("auto", False, None, {"enable_thinking": False}, f"<think>Hm.</think>{RUN}", 1),
        ("auto", False, None, GO_ON, "<think> is a tag.", 0),
        ("auto", False, WORD, {"enable_thinking": False}, "<think>Hm.</think>", 0),
    ],
)
def test_the_reader_takes_only_what_the_grammar_holds(
    tokenizer, mode, is_strict, form, how, answer, num_calls
):
    tokenizer._tokenizer.chat_template = THINKS.replace(
        "{% if enable_thinking is defined and enable_thinking %}<think>",
        "{% if enable_thinking is defined %}<think></think>",
    )
    model = model_text(tokenizer)
    model.chat_format = HERMES
    messages = [user("Go on."), *([assistant("</think>Well, ")] if how is GO_ON else [])]
    tools, choice = [Tool("run", strict=is_strict)], ToolChoice(mode)
    conversation = ChatRequest(messages, tools=tools, choice=choice, **how)
    params = SamplingParams(structured_outputs=form)
    parser = asyncio.run(prepare(model, conversation, params)).make_parser()
    said = gather([*parser.feed(answer), *parser.close()])
    assert len(said.calls) == num_calls
    if num_calls == 0:
        assert said.text == answer
