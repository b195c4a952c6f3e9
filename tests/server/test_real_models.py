"""Templates and tokenizers of real models: a turn as the server makes it, token by token."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from tests.support.chat import real_parts, real_tokenizers
from tests.support.chat.guided import allowed, guided_answer
from tests.support.chat.text import TOOLS, Said, gather
from tests.support.chat.writers import WRITERS
from tests.support.server.kit import model_text
from vllm_metal_lite.chat_formats.tool import Tool, ToolChoice
from vllm_metal_lite.engine.detokenizer import Detokenizer
from vllm_metal_lite.sampling.masks import Constraint
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.conversations import ChatRequest
from vllm_metal_lite.server.model_text import ModelText
from vllm_metal_lite.server.turns import PreparedTurn, prepare
from vllm_metal_lite.structured_outputs import build

pytestmark = pytest.mark.long

AUTO = ToolChoice()
CALLS = [
    ("read", {"path": "src/ä b.txt", "limit": 3}),
    ("run", {"cmd": 'echo "🦙\n" </x>', "dry": True}),
]
# Of the first package: templates on the hub; "": the family's own.
MODELS = [
    ("qwen3.5", ""),
    ("qwen3.5", "Qwen-Qwen3-4B-Instruct-2507"),
    ("qwen3.5", "Qwen-Qwen3-Coder-30B-A3B-Instruct"),
    ("llama3", ""),
    ("gemma4", ""),
    ("deepseek", ""),
    ("deepseek", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"),
    ("deepseek", "deepseek-ai-DeepSeek-V3.2"),
    ("deepseek", "deepseek-ai-DeepSeek-V4"),
    ("gpt-oss", ""),
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: f"{m[0]}-{m[1]}".strip("-"))
def model(request):
    return model_of(*request.param)


@lru_cache(maxsize=1)  # a tokenizer takes seconds and 200 MB; gpt-oss comes last, and again below
def model_of(family: str, name: str) -> ModelText:
    """name: of a template on the hub; "": the family's own."""
    template = real_parts.template(name) if name else ""
    with TemporaryDirectory() as folder:
        real_tokenizers.tokenizer_folder(Path(folder), family, template)
        return model_text(load_tokenizer(Path(folder)), family)


def turn_of(
    model: ModelText,
    choice: ToolChoice = AUTO,
    tools: Sequence[Tool] = TOOLS,
    budget: int | None = None,
    **thoughts: Any,
) -> PreparedTurn:
    how = {"choice": choice, "thinking_budget": budget}
    conversation = ChatRequest(
        [{"role": "user", "content": "Read it."}], tools=tools, **how, **thoughts
    )
    return asyncio.run(prepare(model, conversation, SamplingParams()))


def said_by(model: ModelText, turn: PreparedTurn, token_ids: list[int]) -> Said:
    """The answer that these tokens make, read token by token."""
    answer: list[int] = []
    detokenizer = Detokenizer(model.tokenizer, turn.params, answer, turn.prompt.token_ids)
    parser, events, done = turn.make_parser(), [], 0
    for token_id in token_ids:
        answer.append(token_id)
        text = detokenizer.text()
        events += parser.feed(text[done:])
        done = len(text)
    return gather([*events, *parser.close()])


def encode(model: ModelText, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=False)


def test_calls_token_by_token(model):
    turn = turn_of(model)
    format_ = model.chat_format
    text = WRITERS[format_.name](CALLS)
    tail = model.tokenizer.decode(turn.prompt.token_ids[-64:])
    if format_.opens_reasoning(tail):
        text = f"Hm.\n{format_.thoughts.end}\n\n{text}"
    said = said_by(model, turn, encode(model, text))
    assert said.called == CALLS
    assert said.text == ""
    assert said.reasoning == ("Hm." if text.startswith("Hm") else "")


@pytest.mark.parametrize("mode", ["required", "auto", "named"])
def test_calls_under_the_grammar(model, mode):
    """Random answers under the masks are calls of the request's tools, with arguments by schema."""
    if model.chat_format.grammar is None:
        pytest.skip(f"{model.chat_format.name} has no grammar")
    tools = [replace(tool, strict=True) for tool in TOOLS] if mode == "auto" else TOOLS
    choice = ToolChoice(mode, "run" if mode == "named" else None)
    turn = turn_of(model, choice, tools)
    assert turn.params.structured_outputs is not None
    writer = WRITERS[model.chat_format.name]
    wanted = encode(model, writer([("run", {"cmd": "ls", "dry": True})]))
    marks = ['"', "}", "]", *(["<|end|>"] if model.chat_format.name == "harmony" else [])]
    closing = [token for mark in marks for token in encode(model, mark)]
    eos, size = sorted(model.tokenizer.eos_token_ids), len(model.tokenizer)
    for seed in range(4):
        constraint = build(replace(turn.params, thinking=None), model.tokenizer, size, eos)
        token_ids = guided_answer(constraint, size, eos, wanted, closing, random.Random(seed))
        said = said_by(model, turn, token_ids)
        # Harmony has text before calls in a channel of its own.
        assert said.text == "" or mode == "auto" or model.chat_format.name == "harmony"
        assert said.calls or mode == "auto"
        for name, arguments in said.called:
            tool = next(tool for tool in TOOLS if tool.name == name)
            jsonschema.validate(arguments, {"type": "object", **tool.parameters})
            assert name == "run" or mode != "named"


@pytest.fixture(scope="module")
def gpt_oss():
    return model_of("gpt-oss", "")


def limits_of(model: ModelText, turn: PreparedTurn, answer: str) -> Constraint:
    """The constraint of an answer that has begun so."""
    tokenizer = model.tokenizer
    limits = build(turn.params, tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    for token_id in encode(model, answer):
        limits.accept(token_id)
    return limits


@pytest.mark.parametrize("choice", [AUTO, ToolChoice("required")], ids=lambda c: c.mode)
def test_a_budget_ends_the_channel_of_thoughts(gpt_oss, choice):
    turn = turn_of(gpt_oss, choice, budget=3)
    limits = limits_of(gpt_oss, turn, "<|channel|>analysis<|message|>I look")
    assert limits.forced() == []
    [last] = encode(gpt_oss, " now")
    limits.accept(last)
    assert [*allowed(limits, len(gpt_oss.tokenizer))] == encode(gpt_oss, "<|end|>")
    [analysis] = encode(gpt_oss, "analysis")
    limits = limits_of(
        gpt_oss,
        turn,
        "<|channel|>analysis<|message|>I look now<|end|><|start|>assistant<|channel|>",
    )
    assert analysis not in allowed(limits, len(gpt_oss.tokenizer))


@pytest.mark.parametrize("thoughts", [{"effort": "none"}, {"enable_thinking": False}])
def test_no_thoughts_where_the_template_cannot_turn_them_off(gpt_oss, thoughts):
    limits = limits_of(gpt_oss, turn_of(gpt_oss, **thoughts), "<|channel|>")
    [analysis] = encode(gpt_oss, "analysis")
    assert analysis not in allowed(limits, len(gpt_oss.tokenizer))


def test_effort_is_a_word_of_the_prompt(gpt_oss):
    assert gpt_oss.can_think
    prompt = gpt_oss.tokenizer.decode(turn_of(gpt_oss, effort="high").prompt.token_ids)
    assert "Reasoning: high" in prompt


def test_where_calls_are_forbidden_their_channel_is_not_sampled(gpt_oss):
    turn = turn_of(gpt_oss, ToolChoice("none"))
    assert "<|channel|>commentary" in turn.params.bad_words
    banned = [gpt_oss.tokenizer.encode(w, add_special_tokens=False) for w in turn.params.bad_words]
    call = encode(gpt_oss, WRITERS["harmony"](CALLS[:1]))
    assert any(call[: len(b)] == b for b in banned)
    said = said_by(gpt_oss, turn, call)
    assert (json.loads(said.text), said.calls) == (CALLS[0][1], [])


@pytest.mark.parametrize("continues", [True, False])
def test_a_continued_answer_has_its_form_without_a_channel(gpt_oss, continues):
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": '{"a": '}]
    how = {"template": {"continue_final_message": True}, "add_generation_prompt": False}
    chat = ChatRequest(messages, **how) if continues else ChatRequest(messages[:1])
    params = SamplingParams(structured_outputs={"json_object": True})
    form = asyncio.run(prepare(gpt_oss, chat, params)).params.structured_outputs
    assert (form == params.structured_outputs) == continues


def test_closed_thoughts_in_the_prompt_leave_the_answer_none():
    model = model_of("qwen3.5", "HuggingFaceTB-SmolLM3-3B")
    assert model.thinks
    assert model.can_think
    params = SamplingParams(structured_outputs={"json_object": True})
    for enabled in (False, True):
        conversation = ChatRequest([{"role": "user", "content": "Go."}], enable_thinking=enabled)
        turn = asyncio.run(prepare(model, conversation, params))
        assert (turn.params.thinking is not None) == enabled
