"""tools/count/launches.py counts launches and bytes of steps; MLX's products as its code reads."""

import pytest

from tests.support.mlx_graph import Eval, Graph, Node, Shape
from tools.bench.lib.configs import BY_NAME, PARTS
from tools.count import launches as count_launches
from tools.count.launches import lengths, ours, theirs
from tools.count.reads import CHIPS, gathered, plain, quantised, used_experts

M4 = CHIPS["m4"]


def test_weights_are_asked_for_once_for_five_rows_or_once_a_row():
    affine = ("affine", 64)
    assert [quantised(n, 1024, 3072, *affine, M4).times for n in (1, 5, 6, 14)] == [1, 1, 2, 3]
    assert quantised(8, 1024, 3072, *affine, CHIPS["m1"]).times == 8
    assert quantised(8, 1024, 3072, "mxfp4", 32, CHIPS["m1"]).times == 2


def test_tiles_of_32_rows_may_split_the_depth():
    whole, split = (quantised(32, 2048, n, "affine", 64, M4) for n in (32 * 512, 2048))
    assert (whole.times, whole.launches) == (1, 1)
    assert (split.times, split.launches, split.partial) == (1, 2, 2 * 8)


def test_products_in_16_bits():
    assert [plain(n, 1024, 3072, M4).times for n in (1, 8, 15)] == [1, 2, 3]
    assert plain(64, 1024, 3072, M4) == (1, 1, 0)
    assert plain(32, 3072, 1024, M4).launches == 2  # split over the depth
    assert plain(32, 1024, 3072, M4).launches == 1


def test_experts_that_are_asked_for():
    assert gathered(64, 50.6, 128, True, True) == 64  # too few pairs an expert
    assert gathered(128, 31.6, 32, True, True) == pytest.approx(31.6 + 7)
    assert gathered(256, 111, 128, True, False) == pytest.approx(111 + 15)
    assert gathered(8, 8, 128, False, False) == 8
    assert used_experts(1, 128, 8) == pytest.approx(8)


def test_layers_of_a_dense_model():
    mine, other = (count(BY_NAME["qwen3-0.6b-4"], lengths(8), M4) for count in (ours, theirs))
    assert mine.launches.total() <= 8
    assert other.launches == {
        "QuantizedMatmul": 7, "rms_norm": 4, "rope": 2, "SliceUpdate": 2, "Add": 3, "swiglu": 1,
        "scaled_dot_product_attention": 1,
    }  # fmt: skip
    # 4 bits, with a scale and a bias of 16 bits for 64; eight rows ask for all of them twice.
    weights = (1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072) * 4.5 / 8
    assert other.nbytes["weights"] == pytest.approx(2 * weights, rel=1e-3)
    assert mine.nbytes["weights"] <= other.nbytes["weights"]
    row = 2 * 8 * 128 * 2
    assert mine.nbytes["K and V"] == row * (sum(lengths(8)) + 8)
    assert other.nbytes["K and V"] == row * (max(lengths(8)) + 1) * 8


@pytest.mark.parametrize("name", [p.name for p in PARTS if p.shape != "qwen3-4b"])
def test_experts_windows_and_latents_are_counted(name):
    counted = BY_NAME[name]
    mine, other = (count(counted, lengths(8), M4) for count in (ours, theirs))
    for cost in (mine, other):
        assert cost.launches.total() > 0
        assert all(cost.nbytes[kind] > 0 for kind in count_launches.KINDS)
        assert all(n > 0 for n in cost.launches.values())
    assert mine.nbytes["weights"] <= 1.01 * other.nbytes["weights"]
    if counted.shape.startswith("glm"):  # latents: a norm, two rotations and the write
        assert mine.launches["metal_lite_latent_write"] == 1
        assert mine.launches.keys().isdisjoint(("metal_lite_kv_write", "rope"))


def test_elementwise_operations_of_a_compiled_step_are_one_launch():
    """c = (a + b) * a; d is used twice, by its chain and by a sum."""
    graph = Graph(dict.fromkeys("abcdefg", Shape((4,), 4)))
    graph.nodes += [
        Node("Add", ("a", "b"), ("c",), []),
        Node("Multiply", ("c", "a"), ("d",), []),
        Node("Reduce", ("d",), ("e",), []),
        Node("Exp", ("d",), ("f",), []),
    ]
    graph.arguments = {"rows": "a", "others": "b"}
    graph.evals.append(Eval("step", ["e", "f"]))
    from tools.count.replay import StepReplay

    launches, nbytes = StepReplay(graph, 4, None, M4, compiles=True).run().all_steps()
    assert launches == {"Multiply": 1, "Reduce": 1, "Exp": 1}
    assert nbytes["activations"] == 16 * (3 + 2 + 2)  # a, b, d; d, e; d, f
    launches, _ = StepReplay(graph, 4, None, M4).run().all_steps()
    assert launches.total() == 4
