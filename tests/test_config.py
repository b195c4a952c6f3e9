"""Options: every bad value is refused when it is given, in one line that names it."""

import numpy as np
import pytest

from tests.support.refusal import Broken, refusal
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import ConfigError, SamplingError
from vllm_metal_lite.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")


class Tall:
    def __repr__(self):
        return "a\nb" * 1000


NO_NUMBERS = [np.float64(NAN), np.array([0.5, 1]), 1j, b"1"]
BAD_CONFIG = {
    "block_size": [0, 7, 12, 64, -8, "16", None, 16.0, np.array([16, 32])],
    "num_blocks": [0, -1, 1.5, "10", True, "1e3"],
    "max_num_seqs": [0, -1, None, 2.0, True],
    "max_num_batched_tokens": [0, -5, None, "64", False],
    "max_model_len": [0, -1, 1.5, "x"],
    "long_prefill_token_threshold": [-1, 1, 15, None, 2.5],
    "max_step_seconds": [-1, INF, NAN, None, "x", True],
    "prefill_policy": ["", "Mixed", None, 1, [], np.array(["mixed", "x"])],
    "enable_prefix_caching": [None, 1, "yes"],
    "memory_fraction": [0, -0.5, 1.5, NAN, "0.5", True],
    "prefix_disk_gib": [-1, 1e308, INF, NAN, None],
    "kv_bits": [0, 3, 16, "8", True, 8.0],
    "dtype": ["float64", "", None, "int8", np.float32],
    "limit_mm_per_prompt": [
        8,
        None,
        '{"image": 8}',
        [],
        {"image": -1},
        {"images": 1},
        {"image": {}},
    ],
    "seed": [-1, None, 1.5, "x", Broken()],
}
BAD_PARAMS = {
    "n": [0, -1, 1025, 1.5, None, True, 10**5000, np.float64(1)],
    "temperature": [-0.1, NAN, INF, None, "1", 10**400, Broken(), Tall(), *NO_NUMBERS],
    "top_k": [-2, 1.5, None],
    "top_p": [0, -0.1, 1.1, NAN, None],
    "min_p": [-0.1, 1.1, NAN],
    "seed": [1.5, "1", 2**64, -(2**63) - 1],
    "repetition_penalty": [0, -1, NAN, INF],
    "presence_penalty": [-2.1, 2.1, NAN, None],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "logit_bias": [[1, 2], "x", 0, "", (), *({1: bad} for bad in (NAN, INF, None, True, 10**400))],
    "stop": ["", ["a", ""], [1], 5, {"a"}, False, {}, set(), b"", np.array([]), ["\udfff"]],
    "stop_token_ids": [[-1], ["a"], [1.5], 7, 0, False, "", {}],
    "allowed_token_ids": [[-1], ["a"], [], 7, {1}, np.array([-1]), [np.float64(1)], iter([1])],
    "bad_words": ["word", [""], [1], 7, 0, "", [["a"]]],
    "max_tokens": [0, -1, 1.5, "9", True],
    "min_tokens": [-1, 17, 1.5, None],
    "logprobs": [-1, 1.5, True],
    "prompt_logprobs": [-1, "1"],
    "ignore_eos": [0, 1, None, [], np.array([True, False])],
    "skip_special_tokens": ["false", None],
    "include_stop_str_in_output": ["false", 1],
}
BAD_PARAMS["logit_bias"] += [{-1: 1.0}, {"a": 1.0}, {1.0: 1}, {True: 1}]
CASES = [
    (make, name, value)
    for make, bad in ((EngineConfig, BAD_CONFIG), (SamplingParams, BAD_PARAMS))
    for name, values in bad.items()
    for value in values
]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    CASES,
    ids=lambda v: v if isinstance(v, str) else getattr(v, "__name__", type(v).__name__),
)
def test_a_bad_value_is_refused_by_name(make, name, value):
    error = ConfigError if make is EngineConfig else SamplingError
    assert issubclass(error, ValueError)
    message = refusal(make, error=error, **{name: value})
    assert message.startswith(f"{name} must be ")
    if type(value) in (str, float, bool, type(None)):
        assert message.endswith(f", got {value!r}")


def test_options_cannot_change_afterwards():
    with pytest.raises(AttributeError):
        EngineConfig().block_size = 3


def test_numpy_scalars_are_numbers():
    params = SamplingParams(
        temperature=np.float64(0.5),
        top_k=np.int64(4),
        seed=np.uint64(2**63),
        max_tokens=np.int8(2),
        logit_bias={np.int64(1): np.float64(2)},
        stop_token_ids=[np.int32(1)],
        ignore_eos=np.bool_(True),
    )
    how = {"stop_token_ids": [1], "ignore_eos": True}
    expected = SamplingParams(
        temperature=0.5, top_k=4, seed=2**63, max_tokens=2, logit_bias={1: 2.0}, **how
    )
    assert repr(params) == repr(expected)  # plain numbers, no numpy
    assert repr(EngineConfig(kv_bits=np.int64(8))) == repr(EngineConfig(kv_bits=8))


def test_good_values_at_the_limits():
    how = {"presence_penalty": -2, "frequency_penalty": 2, "stop": "x", "stop_token_ids": (0,)}
    how |= {"min_tokens": 16, "logprobs": 64}
    SamplingParams(n=1024, temperature=0, top_k=-1, top_p=1, min_p=1, seed=2**64 - 1, **how)
    EngineConfig(memory_fraction=1, long_prefill_token_threshold=16, num_blocks=1, max_num_seqs=1)
