"""`/v1/completions`, as the official client sees it, beside the embedded engine."""

import pytest

from tests.support.server.command import eventually
from vllm_metal_lite import SamplingParams

PROMPT = "The lantern in the rain"


@pytest.fixture(scope="module")
def lenient(client):
    """The types of the client allow no finish_reason of null in a stream, and no null for the first
    token of a prompt.  OpenAI's own server sends both."""
    return client.copy(_extra_kwargs={"_strict_response_validation": False})


def embedded(llm, prompt, **options):
    [output] = llm.generate([prompt], SamplingParams(**options), use_tqdm=False)
    return output


def complete(client, prompt=PROMPT, **options):
    return client.completions.create(model="demo", prompt=prompt, **options)


def joined(stream, count=1):
    """The texts of a stream's choices."""
    texts = [""] * count
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    return texts


def test_text_or_tokens_streamed_or_not_as_the_embedded_engine(client, lenient, llm):
    expected = embedded(llm, PROMPT, temperature=0, max_tokens=16)
    answer = expected.outputs[0]
    for prompt in PROMPT, expected.prompt_token_ids, [PROMPT], [expected.prompt_token_ids]:
        whole = complete(client, prompt, temperature=0, max_tokens=16)
        assert whole.id.startswith("cmpl-")
        assert (whole.object, whole.model) == ("text_completion", "demo")
        [choice] = whole.choices
        assert (choice.text, choice.finish_reason) == (answer.text, answer.finish_reason)
        assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert whole.usage.completion_tokens == len(answer.token_ids)
    chunks = list(complete(lenient, temperature=0, max_tokens=16, stream=True))
    assert joined(chunks) == [answer.text]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [answer.finish_reason]


def test_several_prompts_and_answers(client, lenient):
    prompts = [PROMPT, "One, two, three", "x = "]
    alone = [complete(client, prompt, temperature=0, max_tokens=8) for prompt in prompts]
    num_tokens = 2 * sum(answer.usage.completion_tokens for answer in alone)
    whole = complete(client, prompts, temperature=0, max_tokens=8, n=2)
    assert [choice.index for choice in whole.choices] == list(range(6))
    expected = [answer.choices[0].text for answer in alone for _ in range(2)]
    assert [choice.text for choice in whole.choices] == expected
    assert whole.usage.completion_tokens == num_tokens
    how = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = complete(lenient, prompts, temperature=0, max_tokens=8, n=2, **how)
    assert joined(chunks, 6) == expected
    assert last.usage.completion_tokens == num_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_echo(client, lenient, llm):
    ids = embedded(llm, PROMPT, max_tokens=1).prompt_token_ids
    text = complete(client, temperature=0, max_tokens=4).choices[0].text
    for prompt in PROMPT, ids:
        echoed = complete(client, prompt, temperature=0, max_tokens=4, echo=True, n=2)
        assert [choice.text for choice in echoed.choices] == [PROMPT + text] * 2
        stream = complete(lenient, prompt, temperature=0, max_tokens=4, echo=True, n=2, stream=True)
        assert joined(stream, 2) == [PROMPT + text] * 2


def test_logprobs(client, lenient, llm):
    expected = embedded(llm, PROMPT, temperature=0, max_tokens=3, logprobs=2).outputs[0]
    scores = complete(client, temperature=0, max_tokens=3, logprobs=2).choices[0].logprobs
    assert len(scores.tokens) == 3
    assert "".join(scores.tokens) == expected.text
    assert scores.text_offset == [len("".join(scores.tokens[:i])) for i in range(3)]
    for i, position in enumerate(expected.logprobs):
        chosen = position[expected.token_ids[i]]
        assert scores.token_logprobs[i] == pytest.approx(chosen.logprob, abs=1e-5)
        assert list(scores.top_logprobs[i]) == [p.decoded_token for p in position.values()]
    chunks = complete(lenient, temperature=0, max_tokens=3, logprobs=2, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in parts for token in part.tokens] == scores.tokens
    assert [offset for part in parts for offset in part.text_offset] == scores.text_offset
    assert complete(client, max_tokens=1).choices[0].logprobs is None


def test_a_prompt_is_scored_without_an_answer(lenient, llm):
    """As lm-eval asks; max_tokens of 0 is allowed with echo."""
    output = embedded(llm, PROMPT, temperature=0, max_tokens=1, prompt_logprobs=1)
    [choice] = complete(lenient, max_tokens=0, echo=True, logprobs=1).choices
    scores = choice.logprobs
    assert choice.text == PROMPT == "".join(scores.tokens)
    assert choice.finish_reason == "length"
    assert (scores.token_logprobs[0], scores.top_logprobs[0]) == (None, None)
    for i, position in enumerate(output.prompt_logprobs[1:], 1):
        chosen = position[output.prompt_token_ids[i]]
        assert scores.token_logprobs[i] == pytest.approx(chosen.logprob, abs=1e-5)
    only = {"max_tokens": 0, "echo": True, "n": 2, "extra_body": {"min_tokens": 3}}
    stream = complete(lenient, **only, stream=True, stream_options={"include_usage": True})
    for usage in complete(lenient, **only).usage, list(stream)[-1].usage:
        assert usage.completion_tokens == 0
        assert usage.total_tokens == usage.prompt_tokens == len(output.prompt_token_ids)
    answer = complete(lenient, temperature=0, max_tokens=1, echo=True, logprobs=1).choices[0]
    assert answer.logprobs.tokens[:-1] == scores.tokens
    assert answer.text == PROMPT + answer.logprobs.tokens[-1]


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_are_where_the_tokens_are_in_the_text(lenient, llm, as_ids):
    """Also of tokens that are bytes of a character, or a single space."""
    text = "The  lantern 🎉 in  7 rains"
    ids = llm.get_tokenizer().encode(text)
    for prompt in text, ids:
        options = {"temperature": 0, "max_tokens": 6, "echo": True, "logprobs": 0}
        extra = {"return_tokens_as_token_ids": as_ids}
        [choice] = complete(lenient, prompt, **options, extra_body=extra).choices
        offsets, whole = choice.logprobs.text_offset, choice.text
        assert len(offsets) > len(ids)
        assert offsets == sorted(offsets)
        assert offsets[len(ids)] == len(text)
        for token_id, offset in zip(ids, offsets, strict=False):
            token = llm.get_tokenizer().decode([token_id])
            assert whole.startswith("🎉" if "\ufffd" in token else token, offset)
        chunks = list(complete(lenient, prompt, **options, extra_body=extra, stream=True))
        parts = [chunk.choices[0].logprobs for chunk in chunks]
        assert [offset for part in parts for offset in part.text_offset] == offsets


def test_no_offset_is_past_the_end_of_a_text_that_a_stop_string_ends(client, llm):
    options = {"temperature": 0, "max_tokens": 24}
    text = embedded(llm, PROMPT, **options, ignore_eos=True).outputs[0].text
    at = len(text) // 2
    stop, extra = text[at : at + 8], {"ignore_eos": True}
    [choice] = complete(client, **options, stop=stop, logprobs=0, extra_body=extra).choices
    assert choice.text == text[: text.index(stop)]
    assert len(choice.logprobs.tokens) > 1
    assert max(choice.logprobs.text_offset) <= len(choice.text)


def test_prompt_logprobs_and_tokens_as_ids(client, llm):
    expected = embedded(llm, PROMPT, temperature=0, max_tokens=1)
    extra = {"prompt_logprobs": 0, "return_tokens_as_token_ids": True}
    [choice] = complete(client, temperature=0, max_tokens=1, logprobs=0, extra_body=extra).choices
    assert choice.logprobs.tokens == [f"token_id:{expected.outputs[0].token_ids[0]}"]
    scored = choice.model_extra["prompt_logprobs"]
    assert [next(iter(p)) for p in scored[1:]] == [str(t) for t in expected.prompt_token_ids[1:]]


def test_a_stream_of_several_prompts_that_is_closed_holds_nothing(lenient, running):
    options = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    stream = complete(lenient, [PROMPT, "x = ", "y"], stream=True, **options)
    next(iter(stream))
    stream.close()
    eventually(lambda: not running.server.requests)


def test_one_error_among_several_prompts_ends_the_stream(http):
    """Only "!" is allowed, and a second one would complete a bad word."""
    body = {"prompt": [PROMPT, "x = "], "stream": True, "max_tokens": 9, "allowed_token_ids": [5]}
    body |= {"bad_words": ["!!"]}
    answer = http.post("/v1/completions", json=body)
    *_, last, done, end = answer.text.split("\n\n")
    assert "no token can be sampled" in last
    assert (done, end) == ("data: [DONE]", "")
