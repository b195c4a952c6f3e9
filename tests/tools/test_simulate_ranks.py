"""The arithmetic of several machines: sums by hand, weights as mlx-lm has them, and the table."""

import pytest

from tests.support import tiny_models
from tools.bench import sums as time_sums
from tools.count import ranks as simulate_ranks
from tools.count.ranks import CHIPS, MODELS, Chip, Link, Shape
from vllm_metal_lite.backend import leaves

# 600 weights of attention, 600 of the MLP and 1,000 of the head, a byte each with 8 bits; 40
# bytes of K and V a token.
SMALL = Shape(2, 10, 2, 1, 5, 10, 100, tied=True)
SLOW = Chip(gb_s=1e-6, tflops=1, gib=1)  # 1,000 bytes a second


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_weights_are_those_of_the_model(name):
    model = tiny_models.native(name)
    a = model.args
    experts = getattr(a, "num_experts", 1)
    shape = Shape(
        a.num_hidden_layers, a.hidden_size, a.num_attention_heads, a.num_key_value_heads,
        a.head_dim, a.moe_intermediate_size if experts > 1 else a.intermediate_size, a.vocab_size,
        a.tie_word_embeddings, experts,
    )  # fmt: skip
    count = sum(p.size for p in leaves(model.parameters()) if p.ndim > 1)
    if experts > 1:
        count -= shape.layers * experts * shape.hidden  # routers
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    mine = simulate_ranks.attention_weights(shape) + simulate_ranks.mlp_weights(shape, experts)
    assert mine + embeddings == count


def test_a_step_by_hand():
    assert simulate_ranks.attention_weights(SMALL) == 600
    assert simulate_ranks.mlp_weights(SMALL, 1) == 600
    assert simulate_ranks.kv_bytes(SMALL, 3, 10) == 3 * 10 * 40
    one = simulate_ranks.step_seconds(SMALL, 8, SLOW, 3, 10)
    assert one == pytest.approx((1200 + 1000 + 1200) / 1000)
    # Each of two ranks reads half of the layers and the whole head; 4 sums of 60 bytes, one of 12.
    link = Link(us=1e5, gb_s=1e-6)
    two = simulate_ranks.step_seconds(SMALL, 8, SLOW, 3, 10, 2, link)
    assert two == pytest.approx((600 + 1000 + 600) / 1000 + 5 * 0.1 + (4 * 60 + 12) / 1000)


def test_products_of_many_rows_take_the_time_of_computing():
    slow = SLOW._replace(gb_s=1, tflops=1e-9)
    assert simulate_ranks.step_seconds(SMALL, 8, slow, 64, 1) == pytest.approx(
        2 * 64 * 2200 / 1000, rel=1e-3
    )


def test_a_sum_goes_around_a_ring_or_straight_to_all():
    ring, mesh = Link(100, 1), Link(100, 1, mesh=True)
    assert simulate_ranks.sum_seconds(ring, 4, 8000) == pytest.approx(3 * 100e-6 + 12e-6)
    assert simulate_ranks.sum_seconds(mesh, 4, 8000) == pytest.approx(100e-6 + 12e-6)


def test_a_token_uses_its_experts_and_many_tokens_nearly_all():
    shape = MODELS["Qwen3-30B-A3B"]
    assert simulate_ranks.used_experts(shape, 1) == pytest.approx(8)
    assert 120 < simulate_ranks.used_experts(shape, 64) < 128


def test_two_machines_hold_what_one_cannot_and_heads_must_divide():
    case = 16, CHIPS["M4 Pro"], 1, 2048
    big, experts = MODELS["Qwen3-32B"], MODELS["Qwen3-30B-A3B"]
    assert simulate_ranks.data_rate(big, *case, 2) is None
    assert simulate_ranks.tensor_rate(big, *case, 2, Link(30, 6)) > 0
    assert simulate_ranks.tensor_rate(experts, *case, 8, Link(30, 6)) is None


def test_servers_share_the_requests_and_one_request_has_one_server():
    case = MODELS["Qwen3-4B"], 16, CHIPS["M4 Max"]
    assert simulate_ranks.data_rate(*case, 1, 64, 4) == simulate_ranks.data_rate(*case, 1, 64, 1)
    four, one = simulate_ranks.data_rate(*case, 8, 64, 4), simulate_ranks.data_rate(*case, 2, 64, 1)
    assert four == pytest.approx(4 * one)


def test_the_table(capsys):
    simulate_ranks.main(["--chip", "H200", "--link", "20", "350", "--batches", "1"])
    first, _, head, _, *rows = capsys.readouterr().out.splitlines()
    assert "Predicted" in first
    assert head.count("|") == rows[0].count("|")
    assert len(rows) == 6
    with pytest.raises(SystemExit):
        simulate_ranks.main(["--context", "0"])


def test_sums_are_timed_in_two_processes(capfd):
    assert time_sums.main(["--values", "64"]) == 0
    *_, row = capfd.readouterr().out.splitlines()
    assert row.startswith("| 128 | ")
