"""MLX's attention kernels on the host, against float64: see test_host_foreign.py."""

import pytest

from tests.support.host.foreign_attention import (
    sdpa_vector,
    steel_attention,
    two_pass_first,
    two_pass_second,
)
from tests.support.host.foreign_runs import DTYPES, check_close, with_all_options

dtypes = pytest.mark.parametrize("dtype", DTYPES)


# mask, query heads, KV heads, queries, keys, head dim
@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        *((dtype, ("none", 4, 2, 1, 77, 64)) for dtype in DTYPES),
        *((dtype, ("none", 2, 1, 1, 40, 128)) for dtype in DTYPES),
        *((dtype, ("causal", 4, 2, 3, 50, 96)) for dtype in DTYPES),
        *((dtype, ("float", 2, 1, 2, 45, 64)) for dtype in DTYPES),
        *((dtype, ("sinks", 4, 2, 1, 35, 64)) for dtype in DTYPES),
        ("float", ("none", 4, 4, 1, 1, 64)),
        ("half", ("bool", 2, 2, 2, 45, 64)),
    ],
    ids=str,
)
def test_sdpa_vector(dtype, case):
    dispatch, expected = sdpa_vector(dtype, *case)
    check_close(*with_all_options(dispatch.run, checked=dtype == "float"), expected, dtype)


@dtypes
@pytest.mark.parametrize("keys", [33, 150])
def test_sdpa_two_pass(dtype, keys):
    first, expected = two_pass_first(dtype, 4, 2, 2, keys, 64)
    checked = dtype == "float"
    second = two_pass_second(dtype, *with_all_options(first.run, checked=checked))
    check_close(*with_all_options(second.run, checked=checked), expected, dtype)


# causal, query heads, KV heads, queries, keys, head dim
@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        ("float", (False, 2, 1, 64, 64, 64)),
        ("float", (False, 2, 2, 45, 77, 64)),
        ("float", (True, 2, 1, 70, 70, 64)),
        ("float", (True, 2, 1, 33, 90, 64)),
        ("bfloat16_t", (True, 1, 1, 5, 9, 64)),
        ("bfloat16_t", (False, 2, 1, 32, 48, 64)),
        ("half", (False, 2, 1, 32, 48, 128)),
        ("half", (True, 2, 1, 41, 59, 128)),
        ("half", (True, 2, 1, 20, 71, 128)),
    ],
    ids=str,
)
def test_steel_attention(dtype, case):
    dispatch, expected = steel_attention(dtype, *case)
    check_close(*with_all_options(dispatch.run), expected, dtype)


def test_steel_attention_with_the_head_dim_halved():
    """Two simdgroups exchange their halves of the scores through threadgroup memory."""
    case = (True, 2, 1, 41, 59, 128)
    dispatch, expected = steel_attention("half", *case, columns=32, halves=2)
    check_close(*with_all_options(dispatch.run), expected, "half")
