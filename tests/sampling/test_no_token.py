"""Logits that no token can be sampled from: that request ends with the reason, and only that."""

import asyncio
import json
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from tests.support.attention.array_attention import compile_on_cpu
from tests.support.engine.guesses import Guesses
from tests.support.engine.sampling import EMPTY
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.backend import mx
from vllm_metal_lite.cli.main import main
from vllm_metal_lite.engine.async_engine import AsyncEngine
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.model import loader
from vllm_metal_lite.sampling.masks import TokenMasks, pack_mask
from vllm_metal_lite.sampling.no_token import MASKED, NAN, why
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.sampling_params import SamplingParams

PROMPTS = tiny.prompts(4, 3, 30, seed=8)
NEVER = {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 3}

# The sampler

KINDS = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "filters": {"temperature": 0.7, "top_p": 0.5, "min_p": 0.1},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "logprobs": {"temperature": 1.0, "logprobs": 2},
}


def sample(x, kinds):
    sampler = Sampler(len(x), x.shape[1])
    for row, kind in enumerate(kinds):
        sampler.add(row, SamplingParams(**KINDS[kind]), row, EMPTY, 0, ())
    return sampler(x, np.arange(len(x)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kinds", [[k] * 4 for k in KINDS] + [list(KINDS)[:4]], ids="-".join)
def test_each_row_is_marked_by_itself(kinds, dtype):
    x = np.random.default_rng(1).normal(size=(4, 300)).astype(np.float32)
    x[1], x[2] = -np.inf, np.nan
    x[3, 1:] = -np.inf  # token 0 is all that may come
    out = sample(mx.array(x).astype(dtype), kinds)
    alone = np.array(sample(mx.array(x[:1]).astype(dtype), kinds[:1]).token_ids)
    assert np.array(out.for_host).tolist() == [alone[0], MASKED, NAN, 0]
    assert np.array(out.token_ids).tolist() == [alone[0], 0, 0, 0]


def test_a_grammar_that_allows_nothing_but_an_end_may_end_before_min_tokens():
    """As in vLLM; without a grammar such a row has no token."""
    x = mx.array(np.random.default_rng(2).normal(size=(3, 40)).astype(np.float32))
    sampler = Sampler(3, 40)
    for row in range(3):
        early = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[7], logit_bias={7: 9.0})
        sampler.add(row, early, 0, EMPTY, 0, (8,))
    bits = np.stack([pack_mask(tokens, 40) for tokens in ([7, 8], [7, 20])])
    grammar = TokenMasks(np.array([2, 0]), bits)
    drawn = np.array(sampler(x, np.arange(3), grammar).for_host)
    assert drawn[[0, 2]].tolist() == [20, 7]
    assert drawn[1] not in (7, 8)


# The engine


@cache
def loaded(name):
    """A model with a tokenizer, which bad words need."""
    with TemporaryDirectory() as folder:
        return loader.load(str(tiny.write_folder(Path(folder), name)))


def engine(kind, **options):
    made = tiny.engine(loaded("llama"), speculate="auto" if kind == "drafts" else "off", **options)
    tiny.run_ahead(made, kind != "one step at a time")
    return compile_on_cpu(made) if kind == "compiled" else made


@pytest.mark.parametrize("kind", ["a step ahead", "one step at a time", "compiled", "drafts"])
@pytest.mark.parametrize("random", [False, True])
def test_a_masked_request_ends_in_an_error_and_the_others_go_on(kind, random):
    made = engine(kind, block_size=8)
    temperature = {"temperature": 1.0 if random else 0.0, "seed": 3}
    good = SamplingParams(**temperature, max_tokens=20, ignore_eos=True)

    def run(**bad):
        for i, prompt in enumerate(PROMPTS):
            made.add_request(str(i), prompt, good)
        made.step()
        made.step()  # drafts come with decodes
        for name, fields in bad.items():
            made.add_request(name, PROMPTS[0], SamplingParams(**temperature, **fields))
        done = tiny.run(made)
        assert made.metrics()["blocks_owned"] == 0
        return [done[str(i)].outputs[0].token_ids for i in range(len(PROMPTS))], done

    # The second token would complete a bad word.
    word = {"allowed_token_ids": [9], "bad_words": [2 * tiny.CHARACTERS[9]]}
    expected, _ = run()
    if kind == "drafts":
        made.in_flight.speculator = Guesses(
            made, {str(i): tokens for i, tokens in enumerate(expected)}
        )
    never = {**NEVER, "n": 2, "frequency_penalty": 1.0}
    tokens, done = run(never=never, word={**word, "logprobs": 1})
    assert tokens == expected
    assert run()[0] == expected
    left = "no token can be sampled: all are excluded by allowed_token_ids and"
    for answer in done["never"].outputs:
        assert (answer.finish_reason, answer.token_ids) == ("error", [])
        assert answer.error == f"{left} min_tokens (no stop token may come before it)"
    [answer] = done["word"].outputs
    assert (answer.finish_reason, answer.token_ids) == ("error", [9])
    assert len(answer.logprobs) == 1
    assert answer.error == f"{left} bad_words"


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_block_that_such_a_row_completes_is_never_found(name):
    """The device continued with another token than the host's."""
    made, prompt = tiny.engine(loaded(name)), PROMPTS[1][:6]
    params = tiny.greedy(9, allowed_token_ids=[9], bad_words=[2 * tiny.CHARACTERS[9]])
    assert tiny.ask(made, prompt, params).outputs[0].finish_reason == "error"
    made.rest()
    assert tiny.ask(made, [*prompt, 9, 0, 5], tiny.greedy(4)).num_cached_tokens == 0


def broken() -> nn.Module:
    model = tiny.build(dict(tiny.native("llama").args.__dict__))
    model.update(tree_map(lambda w: w * mx.nan, model.parameters()))
    return model


def test_nan_is_named_without_a_warning_of_numpys():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = LLMEngine(loader.from_model(broken(), None, {}, name="broken"))
        for i, params in enumerate(KINDS.values()):
            made.add_request(str(i), PROMPTS[0], SamplingParams(**params))
        done = tiny.run(made)
    for i in range(len(KINDS)):
        [answer] = done[str(i)].outputs
        assert (answer.finish_reason, answer.token_ids) == ("error", [])
        assert "the model's logits are NaN" in answer.error


async def test_a_stream_ends_with_the_error():
    async def last(params):
        states = [output async for output in served.generate(PROMPTS[0], params)]
        return states[-1].outputs[0]

    served = AsyncEngine(tiny.engine("llama"))
    try:
        greedy = last(SamplingParams(temperature=0, max_tokens=8))
        good, bad = await asyncio.gather(greedy, last(SamplingParams(**NEVER)))
    finally:
        served.shutdown()
    assert good.token_ids == tiny.alone(tiny.native("llama"), PROMPTS[0], 8)
    assert bad.finish_reason == "error"
    assert "all are excluded by" in bad.error


def test_a_line_of_generate_says_it(tmp_path, capsys):
    lines = [{"prompt": "the", "max_tokens": 2}, {"prompt": "the", **NEVER}]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["generate", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 1
    good, bad = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert "error" not in good
    assert (bad["finish_reason"], bad["token_ids"]) == ("error", [])
    assert "all are excluded by" in bad["error"]
    assert "line 2: no token can be sampled" in capsys.readouterr().err


def test_reasons():
    plain = SamplingParams()
    assert "logits are all -inf" in why(MASKED, plain, 0)
    assert "logits are NaN" in why(NAN, SamplingParams(**NEVER), 0)
    assert "all are excluded by the grammar" in why(MASKED, plain, 0, True)
    assert "min_tokens" not in why(MASKED, SamplingParams(**NEVER), 3)
