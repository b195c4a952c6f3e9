"""Options: every bad value is refused when it is given, in one line that names it."""

import pytest

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import ConfigError, MetalLiteError, SamplingError
from vllm_metal_lite.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")

BAD_CONFIG = {
    "block_size": [0, 7, 12, 64, -8, "16", None],
    "num_blocks": [0, -1, 1.5, "10", True],
    "max_num_seqs": [0, -1, None, 2.0, True],
    "max_num_batched_tokens": [0, -5, None, "64", False],
    "max_model_len": [0, -1, 1.5, "x"],
    "long_prefill_token_threshold": [-1, 1, 15, None, 2.5],
    "prefill_policy": ["", "Mixed", None, 1, []],
    "enable_prefix_caching": [None, 1, "yes"],
    "memory_fraction": [0, -0.5, 1.5, NAN, "0.5"],
    "kv_bits": [0, 3, 16, "8", True],
    "dtype": ["float64", "", None, "int8"],
    "seed": [-1, None, 1.5, "x"],
}


def one_line_with(error: pytest.ExceptionInfo, *words: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    assert all(w in message for w in words), message
    assert isinstance(error.value, MetalLiteError)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD_CONFIG.items() for v in vs])
def test_bad_options_are_refused(name, value):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{name: value})
    one_line_with(error, name, repr(value))


def test_options_that_contradict_each_other():
    with pytest.raises(ConfigError) as error:
        EngineConfig(long_prefill_token_threshold=100, max_model_len=50)
    one_line_with(error, "100", "50")


def test_options_cannot_change_afterwards():
    with pytest.raises(AttributeError):
        EngineConfig().block_size = 3


BAD_PARAMS = {
    "n": [0, -1, 1025, 1.5, None, True],
    "temperature": [-0.1, NAN, INF, None, "1"],
    "top_k": [-2, 1.5, None],
    "top_p": [0, -0.1, 1.1, NAN, None],
    "min_p": [-0.1, 1.1, NAN],
    "seed": [1.5, "1", 2**64, -(2**63) - 1],
    "repetition_penalty": [0, -1, NAN, INF],
    "presence_penalty": [-2.1, 2.1, NAN, None],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "logit_bias": [{-1: 1.0}, {1: NAN}, {1: INF}, {"a": 1.0}, {1: None}, [1, 2], "x"],
    "stop": ["", ["a", ""], [1], 5, {"a"}],
    "stop_token_ids": [[-1], ["a"], [1.5], 7],
    "allowed_token_ids": [[-1], ["a"], [], 7],
    "bad_words": ["word", [""], [1], 7],
    "max_tokens": [0, -1, 1.5, "9", True],
    "min_tokens": [-1, 17, 1.5, None],
    "logprobs": [-1, 1.5, True],
    "prompt_logprobs": [-1, "1"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD_PARAMS.items() for v in vs])
def test_bad_sampling_parameters_are_refused(name, value):
    with pytest.raises(SamplingError) as error:
        SamplingParams(**{name: value})
    one_line_with(error, name, repr(value))


def test_good_values_at_the_limits():
    SamplingParams(
        n=1024, temperature=0, top_k=-1, top_p=1, min_p=1, seed=2**64 - 1, presence_penalty=-2,
        frequency_penalty=2, stop="x", stop_token_ids=(0,), min_tokens=16, logprobs=64,
    )  # fmt: skip
    EngineConfig(memory_fraction=1, long_prefill_token_threshold=16, num_blocks=1, max_num_seqs=1)
