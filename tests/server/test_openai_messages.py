"""OpenAI's messages as chat templates get them."""

import pytest

from vllm_metal_lite.rules import rules_of
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.anthropic_api import MessagesRequest
from vllm_metal_lite.server.content import arguments_of
from vllm_metal_lite.server.errors import ApiError
from vllm_metal_lite.server.openai_api.chat import ChatCompletionRequest
from vllm_metal_lite.server.openai_api.chat_messages import ConversationFields, chat_messages
from vllm_metal_lite.server.openai_api.completions import CompletionRequest
from vllm_metal_lite.server.openai_api.logprobs import TokenNames, prompt_logprobs
from vllm_metal_lite.server.openai_api.responses import ResponsesRequest
from vllm_metal_lite.server.params import RENAMED

USER = {"role": "user", "content": "hi"}


def test_developers_are_systems_and_those_at_the_front_become_one():
    assert chat_messages(
        [
            {"role": "developer", "content": "a"},
            {"role": "system", "content": [{"type": "text", "text": "b"}]},
            USER,
            {"role": "developer", "content": "c"},
        ]
    ) == [{"role": "system", "content": "a\n\nb"}, USER, {"role": "system", "content": "c"}]


def test_a_single_system_message_keeps_its_fields():
    message = {"role": "system", "content": "a", "name": "boss"}
    assert chat_messages([message, USER]) == [message, USER]


def test_calls_of_tools_and_their_results():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    result = {"role": "tool", "tool_call_id": "1", "content": "ok"}
    rendered = chat_messages(
        [{"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}, result]
    )
    function = {"name": "f", "arguments": {"x": [1]}}
    assert rendered == [
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]},
        result,
    ]


@pytest.mark.parametrize("name", ["partial", "prefix"])
def test_a_begun_answer_goes_on(name):
    said = {"role": "assistant", "content": "The"}
    fields = ConversationFields()
    named = fields.conversation([USER, {**said, name: True}])
    plain = ConversationFields(continue_final_message=True).conversation([USER, said])
    assert named.template == plain.template == {"continue_final_message": True}
    assert not named.add_generation_prompt
    assert not plain.add_generation_prompt
    for messages in [USER, {**said, name: False}], [{**USER, name: True}], [{**said, name: "x"}]:
        assert fields.conversation(messages).add_generation_prompt


def test_the_older_form_of_a_call():
    old = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    call, result = chat_messages([old, {"role": "function", "name": "f", "content": "ok"}])
    function = {"name": "f", "arguments": {}}
    assert call["tool_calls"] == [{"type": "function", "function": function}]
    assert "function_call" not in call
    assert result == {"role": "tool", "name": "f", "content": "ok"}


def test_arguments_are_always_an_object():
    for text in '{"x": ', "[1]", "5", '{"x": NaN}', '{"x": 1e999}':
        assert arguments_of(text) == {"INVALID_JSON": text}
    for text, value in {"null": {}, "": {}, '{"x": "a\nb"}': {"x": "a\nb"}}.items():
        assert arguments_of(text) == value


@pytest.mark.parametrize("calls", [5, [5], [{}], [{"function": {"name": 1}}]])
def test_calls_that_are_none(calls):
    with pytest.raises(ApiError) as refused:
        chat_messages([{"role": "assistant", "tool_calls": calls}])
    assert refused.value.param.startswith("messages.0.tool_calls")


def test_variables_of_the_template():
    fields = ConversationFields(
        chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low", documents=[{}]
    )
    conversation = fields.conversation([USER])
    assert conversation.template == {"enable_thinking": False, "documents": [{}]}
    assert conversation.effort == "low"
    assert conversation.add_generation_prompt


def test_a_message_that_goes_on_has_no_generation_prompt_behind_it():
    both = ConversationFields(continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(ApiError, match="cannot both be true"):
        both.conversation([USER])


@pytest.mark.parametrize(
    "body", [ChatCompletionRequest, CompletionRequest, MessagesRequest, ResponsesRequest]
)
def test_every_sampling_parameter_is_a_field(body):
    """Under vLLM's name, or a name of the API's own.  One answer only: the later two APIs."""
    left_out = {"thinking"}
    if body in (MessagesRequest, ResponsesRequest):
        left_out |= {"n", "logprobs", "prompt_logprobs"}
    names = {RENAMED.get(name, name) for name in body.model_fields}
    assert rules_of(SamplingParams).keys() - left_out <= names


class Pieces:
    """A tokenizer whose tokens 1 to 3 are parts of characters."""

    def convert_ids_to_tokens(self, token_id):
        return {1: "<0xE2>", 2: "Ãĥ", 3: "\ufffd"}[token_id]

    def decode(self, token_ids):
        return "é" if token_ids == [4] else "\ufffd"


def test_bytes_of_tokens_that_are_parts_of_characters():
    names = TokenNames(Pieces())
    expected = [[0xE2], [0xC3, 0x83], list("\ufffd".encode()), list("é".encode())]
    assert [names.bytes(token_id) for token_id in (1, 2, 3, 4)] == expected


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_a_logprob_that_json_lacks_is_the_lowest(logprob):
    ((entry,),) = [
        one.values() for one in prompt_logprobs([[(4, logprob, 1)]], TokenNames(Pieces()))
    ]
    assert entry == {"logprob": -9999.0, "rank": 1, "decoded_token": "é"}
