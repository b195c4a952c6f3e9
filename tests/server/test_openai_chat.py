"""`/v1/chat/completions`, as the official client sees it, beside the embedded engine."""

import json

import pytest

from vllm_metal_lite import SamplingParams

ASK = [{"role": "user", "content": "Tell me about a lantern in the rain."}]


def embedded(llm, messages, **options):
    """The first answer of the embedded engine."""
    [output] = llm.chat([messages], SamplingParams(**options), use_tqdm=False)
    return output.outputs[0]


def chat(client, messages=ASK, **options):
    return client.chat.completions.create(model="demo", messages=messages, **options)


def test_streamed_or_not_the_text_is_that_of_the_embedded_engine(client, llm):
    expected = embedded(llm, ASK, temperature=0, max_tokens=24)
    whole = chat(client, temperature=0, max_tokens=24)
    assert whole.id.startswith("chatcmpl-")
    assert (whole.object, whole.model) == ("chat.completion", "demo")
    [choice] = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert whole.usage.completion_tokens == len(expected.token_ids)

    chunks = list(chat(client, temperature=0, max_tokens=24, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk.choices[0] for chunk in chunks]
    assert deltas[0].delta.role == "assistant"
    assert not any(delta.delta.role for delta in deltas[1:])
    assert "".join(delta.delta.content for delta in deltas) == expected.text
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [choice.finish_reason]


def test_without_max_tokens_an_answer_ends_by_itself_or_with_the_context(client, llm):
    """A limit beyond the context is no error."""
    expected = embedded(llm, ASK, temperature=0, max_tokens=None)
    for options in {}, {"max_tokens": 10**9}:
        answer = chat(client, temperature=0, **options)
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == expected.finish_reason


def test_max_completion_tokens_wins_over_max_tokens(client):
    answer = chat(client, max_tokens=9, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_usage_in_a_stream_comes_when_asked_for(client):
    whole = chat(client, temperature=0, max_tokens=5).usage
    options = {"temperature": 0, "max_tokens": 5, "stream": True}
    assert not any(chunk.usage for chunk in chat(client, **options))

    *chunks, last = chat(client, **options, stream_options={"include_usage": True})
    assert not any(chunk.usage for chunk in chunks)
    assert last.choices == []
    assert last.usage.prompt_tokens == whole.prompt_tokens
    assert last.usage.completion_tokens == whole.completion_tokens == 5

    *chunks, last = chat(
        client, **options, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(set(counts))
    assert counts[0] == 0  # the role
    assert counts[-1] == last.usage.completion_tokens == 5


def test_the_second_request_reports_cached_tokens(client):
    messages = [{"role": "user", "content": "Say hello. " * 20}]
    first = chat(client, messages, max_tokens=1).usage
    second = chat(client, messages, max_tokens=1).usage
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens == first.prompt_tokens
    assert 16 <= second.prompt_tokens_details.cached_tokens < second.prompt_tokens


def test_logprobs_are_those_of_the_embedded_engine(client, llm):
    expected = embedded(llm, ASK, temperature=0, max_tokens=6, logprobs=3)
    options = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    whole = chat(client, **options).choices[0].logprobs.content
    assert len(whole) == len(expected.token_ids)
    for entry, token_id, position in zip(whole, expected.token_ids, expected.logprobs, strict=True):
        assert entry.token == position[token_id].decoded_token
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.logprob == pytest.approx(position[token_id].logprob, abs=1e-5)
        ranks = sorted(position.values(), key=lambda p: p.rank)
        assert [top.token for top in entry.top_logprobs] == [p.decoded_token for p in ranks]
    chunks = [chunk.choices[0].logprobs for chunk in chat(client, **options, stream=True)]
    streamed = [entry for scores in chunks if scores for entry in scores.content]
    assert [e.token for e in streamed] == [e.token for e in whole]


def test_without_top_logprobs_only_the_chosen_token_is_scored(client):
    [entry] = chat(client, max_tokens=1, logprobs=True).choices[0].logprobs.content
    assert entry.top_logprobs == []
    assert chat(client, max_tokens=1).choices[0].logprobs is None


def test_a_token_that_is_a_part_of_a_character_shows_its_own_bytes(client, http):
    """The demo model's vocabulary has bytes."""
    lead, _ = http.post("/tokenize", json={"prompt": "é"}).json()["tokens"]
    only = {"allowed_token_ids": [lead]}
    answer = chat(client, max_tokens=1, temperature=0, logprobs=True, extra_body=only)
    [entry] = answer.choices[0].logprobs.content
    assert entry.bytes == [0xC3]


def test_several_answers_and_a_seed(client):
    options = {"n": 3, "temperature": 1.5, "seed": 5, "max_tokens": 8}
    whole = chat(client, **options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    streamed = ["", "", ""]
    for chunk in chat(client, **options, stream=True):
        [choice] = chunk.choices
        streamed[choice.index] += choice.delta.content
    assert streamed == texts
    assert whole.usage.completion_tokens <= 24


def test_stop_strings(client, llm):
    text = embedded(llm, ASK, temperature=0, max_tokens=24).text
    word = text.split()[3]
    for options in {"stop": word}, {"stop": ["never written", word]}:
        whole = chat(client, temperature=0, max_tokens=24, **options).choices[0]
        assert whole.message.content == text[: text.index(word)]
        assert whole.finish_reason == "stop"
        assert whole.model_extra["stop_reason"] == word
        chunks = list(chat(client, temperature=0, max_tokens=24, stream=True, **options))
        assert "".join(c.choices[0].delta.content for c in chunks) == whole.message.content
        assert chunks[-1].choices[0].finish_reason == "stop"
    how = {"stop": word, "extra_body": {"include_stop_str_in_output": True}}
    shown = chat(client, temperature=0, max_tokens=24, **how)
    assert shown.choices[0].message.content == text[: text.index(word) + len(word)]


def test_every_sampling_parameter_reaches_the_engine(client, llm):
    first = embedded(llm, ASK, temperature=0, max_tokens=1)
    for changes in (
        {"logit_bias": {str(first.token_ids[0]): -100}},
        {"extra_body": {"bad_words": [first.text]}},
    ):
        answer = chat(client, temperature=0, max_tokens=1, **changes)
        assert answer.choices[0].message.content != first.text
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [7]}
    extra |= {"ignore_eos": True, "min_tokens": 4, "skip_special_tokens": False, "priority": 3}
    options = {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5}
    options |= {"frequency_penalty": 0.25, "seed": 3, "max_tokens": 40}
    expected = embedded(llm, ASK, **options, **{k: v for k, v in extra.items() if k != "priority"})
    answer = chat(client, **options, extra_body=extra)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_prompt_logprobs(client):
    answer = chat(client, max_tokens=1, extra_body={"prompt_logprobs": 1})
    scored = answer.model_extra["prompt_logprobs"]
    assert len(scored) == answer.usage.prompt_tokens
    assert scored[0] is None
    assert all({"logprob", "rank", "decoded_token"} == set(p) for p in scored[1].values())


def test_an_answer_can_go_on_where_the_last_message_ends(client, llm):
    text = embedded(llm, ASK, temperature=0, max_tokens=12).text
    begun = [*ASK, {"role": "assistant", "content": text[:20]}]
    options = {"temperature": 0, "max_tokens": 4}
    go_on = {"continue_final_message": True}
    alone = chat(client, begun, **options, extra_body=go_on).choices[0].message.content
    echoed = chat(client, begun, **options, extra_body={**go_on, "echo": True})
    assert echoed.choices[0].message.content == text[:20] + alone
    streamed = chat(client, begun, **options, stream=True, extra_body={**go_on, "echo": True})
    assert "".join(c.choices[0].delta.content for c in streamed) == text[:20] + alone


def test_null_is_not_given(http):
    any_name = dict.fromkeys(["encode_text", "render", "variables"], 1)
    body = {"messages": ASK, "max_tokens": 2, "chat_template_kwargs": any_name}
    names = ["stream", "n", "temperature", "top_p", "top_k", "stop", "seed", "logprobs"]
    names += ["top_logprobs", "logit_bias", "tools", "tool_choice", "response_format", "user"]
    names += ["priority", "max_completion_tokens", "model"]
    names += ["add_generation_prompt", "echo", "stream_options"]
    answer = http.post("/v1/chat/completions", json={**body, **dict.fromkeys(names)})
    assert answer.status_code == 200, answer.text


def test_an_integer_may_be_written_as_a_float(http):
    """As JSON Schema says."""

    def tokens(path, body):
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    common = {"top_k": 5.0, "seed": 7.0, "priority": -1.0, "stop_token_ids": [3.0]}
    asked = {**common, "messages": ASK, "max_tokens": 2.0, "n": 1.0, "logprobs": True}
    reply = tokens("/v1/chat/completions", {**asked, "top_logprobs": 1.0})
    assert reply["usage"]["completion_tokens"] == 2
    body = {**common, "prompt": [5.0, 6], "max_tokens": 2.0, "best_of": 1.0, "logprobs": 0.0}
    assert tokens("/v1/completions", body)["usage"]["completion_tokens"] == 2
    thinking = {"type": "enabled", "budget_tokens": 9.0}
    body = {**common, "messages": ASK, "max_tokens": 2.0, "thinking": thinking}
    assert tokens("/v1/messages", body)["usage"]["output_tokens"] == 2
    body = {**common, "input": "hi", "max_output_tokens": 2.0}
    assert tokens("/v1/responses", body)["usage"]["output_tokens"] == 2
    assert tokens("/detokenize", {"tokens": [72.0]}) == tokens("/detokenize", {"tokens": [72]})
    body = {"messages": ASK, "max_tokens": 2.5}
    assert http.post("/v1/chat/completions", json=body).status_code == 400


def test_harmless_values_of_unsupported_fields(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    how = {"response_format": {"type": "text"}, "modalities": ["text"], "user": "me"}
    how |= {"store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
    how |= {"extra_body": {"something_new": [1]}}
    answer = chat(client, max_tokens=1, tools=[tool], tool_choice="none", **how)
    assert answer.choices


def test_an_error_in_mid_stream_is_an_event_and_the_stream_ends(http):
    """Only "!" is allowed, and a second one would complete a bad word."""
    body = {"messages": ASK, "max_tokens": 4, "stream": True, "allowed_token_ids": [5]}
    body |= {"bad_words": ["!!"]}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    message = json.loads(events[-2])["error"]["message"]
    assert message == "no token can be sampled: all are excluded by allowed_token_ids and bad_words"
    *_, last, _ = http.post("/v1/messages", json=body).text.split("\n\n")
    assert last.startswith('event: error\ndata: {"type":"error","error":{')
    assert message in last
    whole = http.post("/v1/chat/completions", json={**body, "stream": False})
    assert whole.status_code == 400
    assert whole.json()["error"]["message"] == message
