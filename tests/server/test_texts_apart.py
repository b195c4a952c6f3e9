"""Texts around a call stay apart, thoughts too: the same in all APIs, streamed or not."""

import anthropic
import openai
import pytest

from tests.support.clients import OPTIONS
from tests.support.scripted_answers import hermes_call

SCHEMA = {"type": "object", "properties": {}}
CALL = hermes_call("now")
# An answer, and what a user reads of it.
ANSWERS = {
    f"One.{CALL}Two.": ("", "One.\nTwo."),
    f"One.\n\n{CALL}\n{CALL}\nTwo.": ("", "One.\n\nTwo."),
    f"<think>\nA.\n</think>\n\nOne. {CALL}<think>B.</think>Two.": ("A.\nB.", "One. Two."),
    f"<think>A.{CALL}B.</think>{CALL}": ("A.\nB.", ""),
}


@pytest.fixture(params=["chat", "responses", "messages"])
def read(request, script):
    """Reads an answer: (thoughts, text), whole and streamed."""
    url = script.running.url
    ask = {"model": "demo"}
    said = [{"role": "user", "content": "Go on."}]
    if request.param == "messages":
        client = anthropic.Anthropic(base_url=url, **OPTIONS).messages
        tools = [{"name": "now", "description": "", "input_schema": SCHEMA}]
        ask |= {"messages": said, "tools": tools, "max_tokens": 1000}

        def whole():
            return client.create(**ask)

        def streamed():
            with client.stream(**ask) as stream:
                return stream.get_final_message()

        def texts(message):
            blocks = message.content
            return tuple(
                "".join(getattr(block, kind) for block in blocks if block.type == kind)
                for kind in ("thinking", "text")
            )

    elif request.param == "responses":
        client = openai.OpenAI(base_url=f"{url}/v1", **OPTIONS).responses
        tools = [{"type": "function", "name": "now", "parameters": SCHEMA}]
        ask |= {"input": "Go on.", "tools": tools}

        def whole():
            return client.create(**ask)

        def streamed():
            with client.stream(**ask) as stream:
                return stream.get_final_response()

        def texts(response):
            thoughts = [item for item in response.output if item.type == "reasoning"]
            return "".join(i.content[0].text for i in thoughts), response.output_text

    else:
        client = openai.OpenAI(base_url=f"{url}/v1", **OPTIONS).chat.completions
        function = {"name": "now", "parameters": SCHEMA}
        ask |= {"messages": said, "tools": [{"type": "function", "function": function}]}

        def whole():
            return client.create(**ask)

        def streamed():
            with client.stream(**ask) as stream:
                return stream.get_final_completion()

        def texts(completion):
            message = completion.choices[0].message
            return getattr(message, "reasoning", None) or "", message.content or ""

    return lambda: (texts(whole()), texts(streamed()))


@pytest.mark.parametrize("answer", ANSWERS)
def test_texts_stay_apart(script, read, answer):
    script.says(answer, size=2)
    assert read() == (ANSWERS[answer], ANSWERS[answer])
