"""Pictures packed beside text, against mlx-lm's forward with pictures put in from outside."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support.attention.array_attention import compile_on_cpu
from tests.support.images import seeing
from tests.support.images.seeing import NAMES, SECTIONS, SEES, picture, prompt, words
from tests.support.kernels.device import change_device, pad_to_powers_of_two
from tests.support.models import tiny_models as tiny

# Gemma's pictures are not cut, so they fit into steps of 16 tokens.
A, B, C = picture(1, 2, 7), picture(2, 3, 3), picture(3, 3, 4)
LARGE = picture(4, 4, 6)
PARAMS = tiny.greedy(12, prompt_logprobs=1, ignore_eos=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 16},
    "tiny pool": {"max_num_batched_tokens": 32, "num_blocks": 11},
    "without cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 24},
}
WRONG = {name: ["text", "causal"] for name in SEES}
WRONG |= {name: ["text", "one axis", "answer"] for name in SECTIONS}


def requests(name: str) -> list[dict[str, Any]]:
    last = LARGE if name in SECTIONS else C
    return [
        prompt(words(1, 5), A, words(2, 4), B, words(3, 9)),
        prompt(words(4, 23)),
        prompt(last, words(5, 7)),
    ]


@cache
def oracle(name: str, tokens: tuple[int, ...], which: int, wrong: str = "") -> np.ndarray:
    pictures = requests(name)[which]["multi_modal_data"]["image"]
    return seeing.logits(name, tokens, pictures, wrong)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_packed_pictures_are_those_of_a_whole_forward(name: str, options: dict[str, Any]) -> None:
    """All log-probabilities of prompts, and all greedy tokens.  Pictures of Qwen are cut in the
    middle; the tiny pool preempts."""
    engine = seeing.engine(name, **options)
    found = tiny.outputs(engine, requests(name), PARAMS)
    for which, output in enumerate(found):
        tokens, answer = output.prompt_token_ids, output.outputs[0].token_ids
        expected = oracle(name, (*tokens, *answer), which)
        np.testing.assert_allclose(
            seeing.scores_of(output), seeing.scores(expected, tokens), atol=2e-4
        )
        assert answer == expected[len(tokens) - 1 : -1].argmax(-1).tolist()
    if "num_blocks" in options:
        assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", ["qwen3_vl", *SEES])
def test_compiled_steps_see_each_its_own_picture(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture of a size that came before takes the compiled step with other features, and with
    other spans: the picture moves on in prompts of one length."""
    pad_to_powers_of_two(monkeypatch)
    change_device(monkeypatch, rows_as_decodes=0)
    compiled = []
    engine = compile_on_cpu(seeing.engine(name, enable_prefix_caching=False), "varlen")
    for seed in range(1, 5):
        asked = prompt(words(1, seed), picture(seed, 2, 7), words(2, 8 - seed))
        engine.add_request("r", asked, PARAMS)
        before = engine.runner.num_compiled_steps
        engine.step()
        compiled.append(engine.runner.num_compiled_steps - before)
        [output] = tiny.run(engine).values()
        tokens, answer = output.prompt_token_ids, output.outputs[0].token_ids
        expected = seeing.logits(name, [*tokens, *answer], asked["multi_modal_data"]["image"])
        scores = seeing.scores(expected, tokens)
        np.testing.assert_allclose(seeing.scores_of(output), scores, atol=2e-4)
        assert answer == expected[len(tokens) - 1 : -1].argmax(-1).tolist()
    assert compiled[0] < compiled[1] == compiled[3]
    assert engine.runner.compiled.reason is None


@pytest.mark.parametrize(("name", "wrong"), [(n, w) for n in NAMES for w in WRONG[n]])
def test_the_oracle_can_tell(name: str, wrong: str) -> None:
    """The control: each way to be wrong is far away from the oracle."""
    tokens = (*requests(name)[0]["prompt_token_ids"], *words(8, 12))
    right = seeing.scores(oracle(name, tokens, 0), tokens)
    other = seeing.scores(oracle(name, tokens, 0, wrong), tokens)
    away = np.abs(right - other)
    assert away.max() > 0.02
    if wrong == "answer":  # the prompt up to the last picture is equal
        assert away[:30].max() < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_text_beside_a_picture_is_unchanged_to_the_bit(name: str) -> None:
    """The same tokens once with a picture and once as text: the text request cannot tell."""
    found = []
    for has_picture in (True, False):
        seen = prompt(words(1, 5), A, words(2, 4))
        if not has_picture:
            del seen["multi_modal_data"]
        output = tiny.outputs(seeing.engine(name), [seen, prompt(words(4, 23))], PARAMS)
        found.append([(o.outputs[0].token_ids, seeing.scores_of(o).tolist()) for o in output])
    (picture_seen, text), (unseen, text_alone) = found
    assert text == text_alone
    assert picture_seen != unseen
