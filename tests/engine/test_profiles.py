"""Tokens do not depend on the numbers of devices.py."""

import pytest

from metal.host import installed
from tests.support.kernels.device import change_device
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.checks import verdicts
from vllm_metal_lite.kernels.registry import Verdict

# Alike for three blocks; long enough for splits where those are short; more rows than one decodes.
PREFIX = [1 + i % 50 for i in range(90)]
PROMPTS = [[*PREFIX, 7, 8, 9], [*PREFIX, *range(10, 30)], [*PREFIX, 3], [5, 6, 7], [9] * 70]
# The least and the largest value of each constant that a measurement may change.
LIMITS = {
    "decode_fill": (8, 4096), "min_split_context": (64, 1 << 20), "min_split_keys": (32, 1 << 14),
    "few_keys": (0, 1 << 20), "prefix_fill": (8, 4096), "min_prefix_split_keys": (32, 1 << 14),
    "rope_many_rows": (1, 1 << 30), "gemm_fill": (1, 4096), "max_lane_rows": (0, 4),
    "max_normed_rows": (0, 64), "max_normed_weights": (0, 1 << 30),
    "min_saved_tokens": (256, 1 << 22), "prefix_row_cost": (0, 1), "rows_as_decodes": (0, 512),
    "sdpa_call_cost": (1, 1 << 28), "key_cost": (1, 1 << 14), "decode_sums": (1, 64),
    "decode_sums_of_four": (0, 64), "prefill_registers": (0, 1024),
}  # fmt: skip


def tokens(attention):
    how = {"max_model_len": 160, "num_blocks": 80, "max_num_seqs": 5, "block_size": 16}
    engine = tiny.engine("qwen3", attention=attention, **how)
    first = tiny.answers(engine, PROMPTS[:1], 5)  # its blocks are found again
    rest = tiny.answers(engine, PROMPTS[1:], 5)
    assert engine.runner.attention.name == attention
    return first + rest


@pytest.fixture(scope="module")
def expected():
    return tokens("reference")


@pytest.fixture(params=[0, 1], ids=["least", "largest"])
def extreme(request, expected, monkeypatch):
    """Every constant of LIMITS at its least or largest value."""
    change_device(monkeypatch, **{name: limits[request.param] for name, limits in LIMITS.items()})


def test_the_reference(expected, extreme):
    assert tokens("reference") == expected


@pytest.mark.long
def test_the_kernels(expected, extreme, monkeypatch):
    monkeypatch.setattr(verdicts, "verify", lambda *_: Verdict({}, "varlen"))
    with installed():
        assert tokens("kernels") == expected
