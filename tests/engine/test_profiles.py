"""Tokens do not depend on the numbers of devices.py."""

from dataclasses import replace
from functools import cache

import pytest

from metal.host import compiler_available, installed
from tools.bench.tuning import TUNABLE
from vllm_metal_lite import LLM, SamplingParams
from vllm_metal_lite.devices import profile, using

# Alike for three blocks; long enough for splits where those are short; more rows than one decodes.
PREFIX = [1 + i % 50 for i in range(90)]
PROMPTS = [[*PREFIX, 7, 8, 9], [*PREFIX, *range(10, 30)], [*PREFIX, 3], [5, 6, 7], [9] * 70]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def tokens(attention):
    llm = LLM(
        "demo", attention=attention, num_blocks=80, max_num_seqs=5, max_model_len=160,
        max_num_batched_tokens=64,
    )  # fmt: skip
    first = llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY)  # its blocks are found again
    rest = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS[1:]], GREEDY)
    assert llm.engine.runner.attention.name == attention
    return [output.outputs[0].token_ids for output in (*first, *rest)]


@cache
def expected():
    return tokens("reference")


def extreme(end):
    """Every constant that can be tuned at its least (0) or largest (1) value."""
    return replace(profile(), **{name: limits[end] for name, limits in TUNABLE.items()})


@pytest.mark.parametrize("end", [0, 1], ids=["least", "largest"])
def test_the_reference(end):
    with using(extreme(end)):
        assert tokens("reference") == expected()


@pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")
@pytest.mark.parametrize("end", [0, 1], ids=["least", "largest"])
def test_the_kernels(end):
    with installed(), using(extreme(end)):
        assert tokens("kernels") == expected()
