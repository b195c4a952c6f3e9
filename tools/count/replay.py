"""Replays recorded steps on MLX's Metal encoder, with the chains that `mx.compile` fuses.

The replay of tests/support/metal_replay.py counts every operation.  Here a chain of elementwise
operations is one launch where a step is compiled.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.support.metal_replay import Replay
from tests.support.mlx_graph import MLX_S, OURS, Graph, Node, evaluation_order

# Operations of models that `mx.compile` fuses (`is_fusable` in mlx/compile.cpp).
_ELEMENTWISE = {
    "Abs", "Add", "AsType", "Broadcast", "Cos", "Divide", "Equal", "Erf", "Exp", "Greater",
    "GreaterEqual", "Less", "LessEqual", "Log", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum",
    "Minimum", "Multiply", "Negative", "NotEqual", "Power", "Remainder", "Rsqrt", "Select",
    "Sigmoid", "Sign", "Sin", "Sqrt", "Square", "Subtract", "Tanh",
}  # fmt: skip
# The second pass of an attention that counts as one launch.
_SECOND_PASS = {f"{OURS}merge_partitions"}


class StepReplay(Replay):
    """compiles: elementwise chains of a step are one launch."""

    def __init__(self, graph: Graph, compiles: bool = False) -> None:
        super().__init__(graph)
        self._store = set()  # MLX's operations may read it
        self._compiles, self._ranges = compiles, {}
        self._fused = fused_chains(graph) if compiles else {}

    def launches(self) -> Counter[str]:
        """The launches of all steps, by name."""
        self.run()
        names = [x.name for x in self.encoder.launches if x.name not in _SECOND_PASS]
        return Counter(n.removeprefix(MLX_S) for n in names)

    def _run(self, node: Node) -> None:
        for name in node.inputs:
            if name not in self.graph.maker:  # a constant
                self._array(name)
        if self._compiles and node.op == "Arange" and self._has_same(node):
            self._held[node.outputs[0]] = self._ranges[str(node.arguments)]
        elif node.op != "Broadcast" and self._is_swallowed(node):
            for name in node.outputs:
                self._new(name)
        else:
            super()._run(node)

    def _has_same(self, node: Node) -> bool:
        """Whether an equal range exists already: a compiled step makes each range once."""
        key = str(node.arguments)
        if key in self._ranges:
            return True
        self._ranges[key] = self._new(node.outputs[0])
        return False

    def _is_swallowed(self, node: Node) -> bool:
        i = self.graph.maker[node.outputs[0]]
        return self._fused.get(i, i) != i

    def _primitive(self, node: Node) -> None:
        outputs = [self._new(name) for name in node.outputs]
        inputs = [self._array(name) for name in self._outside(node)]
        if node.op == "Concatenate":
            with self.encoder.concurrently():
                for a in inputs:
                    self._launch(node.op, [a], outputs)
        else:
            self._launch(node.label, inputs, outputs)

    def _outside(self, node: Node) -> Iterator[str]:
        """The arrays that a launch reads: inputs of the chain that ends in `node`."""
        for name in node.inputs:
            maker = self.graph.nodes[i] if (i := self.graph.maker.get(name)) is not None else None
            if maker and self._is_swallowed(maker):
                yield from self._outside(maker)
            else:
                yield name


def fused_chains(graph: Graph) -> dict[int, int]:
    """Elementwise nodes -> the node at the end of their chain, which is the launch.

    A node joins the chain of those that use it if all of them are in one chain.
    """
    ends: dict[int, int] = {}
    done: set[int] = set()
    for _, wanted, fails_after in graph.evals:
        order = evaluation_order(graph, wanted, done)[:fails_after]
        users: defaultdict[int, set[int | None]] = defaultdict(set)
        for name in wanted:
            users[graph.maker.get(name, -1)].add(None)
        for i in reversed(order):
            node = graph.nodes[i]
            of = {u if u is None else ends.get(u, -1) for u in users[i]}
            if node.op in _ELEMENTWISE:
                end = of.pop() if len(of) == 1 else None
                ends[i] = i if end in (None, -1) else end
            for name in node.inputs:
                users[graph.maker.get(name, -1)].add(i)
        done.update(order)
    return ends
