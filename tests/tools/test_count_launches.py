"""tools/count/launches.py counts the launches of steps."""

import pytest

from tests.support.mlx_graph import Eval, Graph, Node, Shape
from tools.bench.lib.configs import SHAPES
from tools.count.launches import PARTS, ours
from tools.count.replay import StepReplay


def test_a_layer_of_a_dense_model():
    assert {part.shape for part in PARTS.values()} <= SHAPES.keys()
    assert ours(PARTS["qwen3-0.6b-4"], 8).layer.total() <= 8


@pytest.mark.parametrize("name", [name for name in PARTS if not name.startswith("qwen3-4b")])
def test_experts_windows_and_latents_are_counted(name):
    counted = PARTS[name]
    layer, besides = ours(counted, 8)
    assert all(n > 0 for n in layer.values())
    assert besides > 0
    if counted.shape.startswith("glm"):  # latents: a norm, two rotations and the write
        assert layer["metal_lite_latent_write"] == 1
        assert layer.keys().isdisjoint(("metal_lite_kv_write", "rope"))


def test_elementwise_operations_of_a_compiled_step_are_one_launch():
    """c = (a + b) * a; d is used twice, by its chain and by a sum."""
    graph = Graph(dict.fromkeys("abcdefg", Shape((4,))))
    graph.nodes += [
        Node("Add", ("a", "b"), ("c",), []),
        Node("Multiply", ("c", "a"), ("d",), []),
        Node("Reduce", ("d",), ("e",), []),
        Node("Exp", ("d",), ("f",), []),
    ]
    graph.arguments = {"rows": "a", "others": "b"}
    graph.evals.append(Eval("step", ["e", "f"]))
    launches = StepReplay(graph, compiles=True).launches()
    assert launches == {"Multiply": 1, "Reduce": 1, "Exp": 1}
    assert StepReplay(graph).launches().total() == 4
