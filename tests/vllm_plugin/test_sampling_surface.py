"""Sampling parameters, log-probabilities and structured output on vLLM's surface."""

import json
import logging
from functools import partial

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.utils import tensor_data

from tests.support.engine.sampling import log_softmax
from tests.support.models import tiny_models as tiny
from tests.vllm_plugin import kit
from vllm_metal_lite import SamplingParams as OurParams

PROMPTS = tiny.prompts(6, 3, 40, seed=5)
greedy = partial(SamplingParams, temperature=0, ignore_eos=True)


pytestmark = pytest.mark.xdist_group("sampling")  # of one worker: they share an engine


@pytest.fixture(scope="module")
def llm():
    with kit.engine(max_num_batched_tokens=16, max_logprobs=-1) as llm:
        yield llm


def embedded(prompts, params):
    """The embedded engine's answers; plenty of room, so nothing is chunked or preempted."""
    engine = tiny.engine("llama", num_blocks=200, max_num_batched_tokens=256)
    return tiny.answers(engine, prompts, params)


SHARED_FIELDS = [
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.5, "seed": 2, "top_k": 7, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3, "min_p": 0.1, "presence_penalty": 1.0},
    {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 0.7, "seed": 5, "logit_bias": {3: 5.0, 4: -100.0}},
    {"temperature": 0.9, "seed": 6, "allowed_token_ids": [1, 2, 3, 5, 8, 13, 21]},
]


def test_one_sampler_behind_both_front_doors(llm):
    """With a seed, vLLM gives the tokens that the embedded engine gives."""
    common = {"max_tokens": 30, "ignore_eos": True}
    expected = embedded(PROMPTS, [OurParams(**common, **f) for f in SHARED_FIELDS])
    theirs = [SamplingParams(**common, **f) for f in SHARED_FIELDS]
    assert kit.tokens(kit.generate(llm, PROMPTS, theirs)) == expected
    assert len({tuple(e) for e in expected}) == len(expected)
    # Nor does it matter who else is in the batch.
    assert kit.tokens(kit.generate(llm, PROMPTS[1:2], theirs[1])) == expected[1:2]


def test_n_answers_of_one_prompt_differ_and_repeat_with_the_seed(llm):
    def answers(seed):
        out = kit.generate(llm, PROMPTS[:1], temperature=1.0, n=4, seed=seed, max_tokens=12)[0]
        return [tuple(o.token_ids) for o in out.outputs]

    first = answers(7)
    assert len(set(first)) == 4
    assert answers(7) == first
    assert answers(8) != first


def test_without_a_seed_answers_differ(llm):
    out = kit.generate(llm, PROMPTS[:1] * 4, temperature=1.5, max_tokens=12)
    assert len(set(map(tuple, kit.tokens(out)))) == 4


def assert_logprobs(entry, expected, chosen, k):
    """entry: {token: Logprob} of one position; expected: (V,) float64."""
    best = np.argsort(-expected, kind="stable")[:k].tolist()
    assert list(entry) == list(dict.fromkeys([chosen, *best]))
    for token, logprob in entry.items():
        assert logprob.logprob == pytest.approx(expected[token], abs=1e-3)
        assert logprob.rank == 1 + (expected > expected[token]).sum()


@pytest.mark.parametrize("k", [0, 3])
def test_logprobs_and_prompt_logprobs_over_chunks(llm, k):
    """Ranks exactly, values to the 1e-3 that float32 attention in two ways may differ by."""
    outputs = kit.generate(
        llm, [*PROMPTS, PROMPTS[0][:1]], max_tokens=5, logprobs=k, prompt_logprobs=k
    )
    for out in outputs:
        prompt, generated = out.prompt_token_ids, list(out.outputs[0].token_ids)
        expected = log_softmax(tiny.logits_alone(tiny.native("llama"), [*prompt, *generated]))
        assert out.prompt_logprobs[0] is None
        assert len(out.prompt_logprobs) == len(prompt)
        for at, entry in enumerate(out.prompt_logprobs[1:], 1):
            assert_logprobs(entry, expected[at - 1], prompt[at], k)
        for at, entry in enumerate(out.outputs[0].logprobs):
            assert_logprobs(entry, expected[len(prompt) + at - 1], generated[at], k)


def test_prompt_logprobs_of_a_prompt_of_one_token_can_be_sent():
    """vLLM sends a tensor's bytes to its front end; an error there ends the server's answers."""
    for tensor in LogprobsTensors.empty_cpu(0, 3)[:3]:
        assert len(tensor_data(tensor)) == 0


def test_all_logprobs(llm):
    out = kit.generate(llm, PROMPTS[:1], max_tokens=1, logprobs=-1)[0]
    assert len(out.outputs[0].logprobs[0]) == tiny.VOCAB


def test_requests_with_and_without_logprobs_mix(llm):
    params = [greedy(max_tokens=8, logprobs=k) for k in (None, 0, 5, None, 2, 1)]
    outputs = kit.generate(llm, PROMPTS, params)
    expected = [kit.alone("llama", p, 8) for p in PROMPTS]
    assert kit.tokens(outputs) == expected
    sizes = [o.outputs[0].logprobs and len(o.outputs[0].logprobs[0]) for o in outputs]
    assert sizes == [None, 1, 5, None, 2, 1]  # greedy: the chosen token is among the best


def test_logprobs_of_named_tokens(llm):
    """Beside requests that want the most likely ones, over chunks and more than one step."""
    named = [[5, 0, 9], [3], None, [1, 2], None, [4]]
    wants = [{"logprob_token_ids": ids} if ids else {"logprobs": 2} for ids in named]
    params = [greedy(max_tokens=3, **want) for want in wants]
    for out, ids in zip(kit.generate(llm, PROMPTS, params), named, strict=True):
        generated = list(out.outputs[0].token_ids)
        expected = log_softmax(
            tiny.logits_alone(tiny.native("llama"), [*out.prompt_token_ids, *generated])
        )
        for at, entry in enumerate(out.outputs[0].logprobs, len(out.prompt_token_ids) - 1):
            chosen = generated[at - len(out.prompt_token_ids) + 1]
            if ids is None:
                assert_logprobs(entry, expected[at], chosen, 2)
                continue
            assert list(entry) == list(dict.fromkeys([chosen, *ids]))
            for token, logprob in entry.items():
                assert logprob.logprob == pytest.approx(expected[at][token], abs=1e-3)


def test_min_tokens_holds_back_the_end(llm):
    eos_soon = {"logit_bias": {tiny.EOS: 100.0}}
    short = kit.generate(llm, PROMPTS, ignore_eos=False, max_tokens=20, **eos_soon)
    assert [len(t) for t in kit.tokens(short)] == [1] * len(PROMPTS)
    longer = kit.generate(llm, PROMPTS, ignore_eos=False, max_tokens=20, min_tokens=6, **eos_soon)
    assert [len(t) for t in kit.tokens(longer)] == [7] * len(PROMPTS)


def test_a_grammar_that_is_over_ends_before_min_tokens():
    """As vLLM's own test_min_tokens_with_terminal_structured_output."""
    grammar = StructuredOutputsParams(json='{"type": "boolean"}')
    how = {"min_tokens": 20, "max_tokens": 40, "structured_outputs": grammar}
    params = SamplingParams(temperature=0, **how)
    with kit.engine("demo") as llm:
        output = llm.generate("Answer:", params, use_tqdm=False)[0].outputs[0]
        eos_token_id = llm.get_tokenizer().eos_token_id
    assert output.finish_reason == "stop"
    assert isinstance(json.loads(output.text), bool)
    assert output.token_ids[-1] == eos_token_id
    assert len(output.token_ids) < params.min_tokens


@pytest.mark.parametrize(
    ("never", "reported", "rules"),
    [
        ({"stop_token_ids": [5], "min_tokens": 3}, [5], "min_tokens"),
        ({"stop_token_ids": [tiny.BOS], "min_tokens": 3}, [tiny.BOS], "min_tokens"),
        ({"bad_words": [tiny.CHARACTERS[5]]}, [0] * 8, "bad_words"),  # no stop token to end with
    ],
)
def test_a_request_without_a_token_ends_at_once(llm, never, reported, rules):
    """vLLM lets a worker fail no single request: it stops, and the log says why."""
    allowed = never.get("stop_token_ids", [5])
    params = [greedy(max_tokens=8), greedy(max_tokens=8, allowed_token_ids=allowed, **never)]
    with kit.logged(logging.ERROR) as said:
        good, bad = kit.generate(llm, PROMPTS[:2], params)
    assert list(good.outputs[0].token_ids) == kit.alone("llama", PROMPTS[0], 8)
    assert list(bad.outputs[0].token_ids) == reported
    [line] = said
    assert f"all are excluded by allowed_token_ids and {rules}" in line


def contains(tokens, word):
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))


def test_bad_words_are_never_completed(llm):
    """One character is one token here: a word of three bans its last after the first two."""
    plain = [kit.alone("llama", p, 30) for p in PROMPTS]
    words = []
    for tokens in plain:  # the first three in a row that are characters, and no space at an end
        at = next(i for i in range(30) if all(0 < t < tiny.EOS for t in tokens[i : i + 3]))
        words.append(tokens[at : at + 3])
    single = plain[0][-1]
    texts = ["".join(tiny.CHARACTERS[t] for t in word) for word in words]
    params = [greedy(max_tokens=30, bad_words=[t, tiny.CHARACTERS[single]]) for t in texts]
    found = kit.tokens(kit.generate(llm, PROMPTS, params))
    for tokens, before, word in zip(found, plain, words, strict=True):
        assert not contains(tokens, word)
        assert single not in tokens
        # Half a word is no bad word: what comes before the first ban is as it was.
        first = next(i for i in range(30) if before[i] == single or before[i - 2 : i + 1] == word)
        assert tokens[:first] == before[:first]
        assert tokens[first] != before[first]


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


def test_structured_output_beside_plain_requests(llm):
    def structured(**kwargs):
        limits = StructuredOutputsParams(**kwargs)
        return SamplingParams(temperature=1.0, seed=1, max_tokens=60, structured_outputs=limits)

    params = [
        structured(choice=["yes", "no", "perhaps"]),
        greedy(max_tokens=30),
        structured(regex=r"[0-9]{3}-[a-f]{4}"),
        structured(json=SCHEMA, disable_any_whitespace=True),
        greedy(max_tokens=30, logprobs=1),
        structured(choice=["left", "right"]),
    ]
    out = kit.generate(llm, PROMPTS, params)
    texts = [o.outputs[0].text for o in out]
    assert texts[0] in ("yes", "no", "perhaps")
    assert len(texts[2]) == 8
    assert texts[2][3] == "-"
    assert set(json.loads(texts[3])) == {"n", "ok"}
    assert texts[5] in ("left", "right")
    for i in (1, 4):
        assert kit.tokens(out)[i] == kit.alone("llama", PROMPTS[i], 30)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"logit_bias": {1: float("-inf")}}, "logit_bias"),
        ({"prompt_logprob_token_ids": [[1]]}, "prompt_logprob_token_ids"),
    ],
)
def test_what_the_sampler_cannot_do_is_a_bad_request(llm, kwargs, named):
    with pytest.raises(VLLMValidationError, match=named):
        kit.generate(llm, PROMPTS[:1], max_tokens=2, **kwargs)
    assert len(kit.tokens(kit.generate(llm, PROMPTS[:1], max_tokens=2))[0]) == 2
