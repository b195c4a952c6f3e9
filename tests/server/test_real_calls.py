"""Calls and thoughts of a scripted model behind Qwen3's template and tokenizer: real tokens."""

import json

import anthropic
import openai
import pytest

from tests.support.chat.scripted_model import write_scripted
from tests.support.server.chat_apis import Chat
from tests.support.server.kit import OPTIONS, serving
from vllm_metal_lite import EngineConfig
from vllm_metal_lite.server.served_model import ModelSpec

pytestmark = pytest.mark.long

COMMAND = 'echo "\u00fc \u2042 </tool_call>" > a.txt'
CALL = f"<tool_call>\n{json.dumps({'name': 'run', 'arguments': {'cmd': COMMAND}})}\n</tool_call>"
SCRIPTS = {
    "violin": [f"<think>\nI look.\n</think>\n\nLet me see.\n{CALL}", "It is done."],
    "glacier": ["One <|fim_middle|>two <|box_end|> three"],
}
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
RUN = {"name": "run", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}


@pytest.fixture(scope="module", params=["markers are text", "markers are special tokens"])
def url(request, tmp_path_factory):
    folder = write_scripted(tmp_path_factory.mktemp("model"), SCRIPTS)
    if "special" in request.param:
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        for token in tokenizer["added_tokens"]:
            token["special"] = token["special"] or token["content"] in MARKERS
        path.write_text(json.dumps(tokenizer))
    config = EngineConfig(num_blocks=256, max_num_seqs=4, trust_remote_code=True)
    with serving([ModelSpec("scripted", str(folder))], config) as running:
        yield running.url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", **OPTIONS) as client:
        yield client


def ask(client, word="violin", **options):
    """The choice of a whole answer, which says what a streamed one does."""
    messages = [{"role": "user", "content": f"Do the {word} task."}]
    tools = [{"type": "function", "function": RUN}]
    given = {"model": "scripted", "messages": messages, "tools": tools, "temperature": 0, **options}
    whole = client.chat.completions.create(**given)
    with client.chat.completions.stream(**given) as stream:
        assert Chat.read(stream.get_final_completion()) == Chat.read(whole)
    return whole.choices[0]


# With stop strings the text comes from the engine's process.
@pytest.mark.parametrize("stop", [None, ["never said"]])
def test_calls_and_thoughts_are_found(client, stop):
    choice = ask(client, stop=stop)
    assert choice.message.reasoning_content == "I look."
    assert choice.message.content == "Let me see."
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"cmd": COMMAND}
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize(("stop", "said"), [("me see", "Let"), ("> a.txt", "Let me see.")])
def test_stop_strings_are_searched_in_the_whole_text(client, stop, said):
    choice = ask(client, stop=[stop])
    assert choice.message.content.strip() == said
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    for call in choice.message.tool_calls or ():
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.function.arguments)


@pytest.mark.parametrize("stop", [None, ["never said"]])
def test_other_special_tokens_are_shown_only_if_asked_for(client, stop):
    assert ask(client, word="glacier", stop=stop).message.content == "One two  three"
    options = {"stop": stop, "extra_body": {"skip_special_tokens": False}}
    assert ask(client, word="glacier", **options).message.content == SCRIPTS["glacier"][0]


def test_a_result_is_fed_back_and_the_prefix_is_found(url):
    tool = {"name": "run", "input_schema": RUN["parameters"]}
    messages = [{"role": "user", "content": "Do the violin task. " + "Take care. " * 60}]
    given = {"model": "scripted", "max_tokens": 500, "tools": [tool]}
    with anthropic.Anthropic(base_url=url, **OPTIONS) as client:
        first = client.messages.create(**given, messages=messages)
        assert first.stop_reason == "tool_use"
        call = first.content[-1]
        assert call.input == {"cmd": COMMAND}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "ok"}
        messages += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = client.messages.create(**given, messages=messages)
    assert [block.text for block in second.content] == ["It is done."]
    assert second.usage.cache_read_input_tokens > 0.9 * first.usage.input_tokens
