"""Launches and bytes of recorded steps on MLX's Metal encoder, with what `mx.compile` fuses.

The replay of tests/support/metal_replay.py counts every operation.  Here chains of elementwise
operations are one launch where a step is compiled, products of MLX take the launches and ask for
the weights that count/reads.py says, and a write into a cache moves its rows alone.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.support.metal_replay import Replay
from tests.support.mlx_graph import MLX_S, OURS, Graph, Node, evaluation_order
from tools.count.reads import Chip, Reads, gathered, plain, quantised, used_experts

# Operations that `mx.compile` fuses (`is_fusable` in mlx/compile.cpp), as far as models use them.
_ELEMENTWISE = {
    "Abs", "Add", "AsType", "Broadcast", "Cos", "Divide", "Equal", "Erf", "Exp", "Greater",
    "GreaterEqual", "Less", "LessEqual", "Log", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum",
    "Minimum", "Multiply", "Negative", "NotEqual", "Power", "Remainder", "Rsqrt", "Select",
    "Sigmoid", "Sign", "Sin", "Sqrt", "Square", "Subtract", "Tanh",
}  # fmt: skip
# The second pass of an attention that counts as one launch.
_SECOND_PASS = {f"{OURS}merge_partitions"}


class Experts(NamedTuple):
    """Of a layer."""

    count: int
    top_k: int


class StepReplay(Replay):
    """nbytes: by kind: weights, "K and V", activations.

    rows: tokens of a step.  compiles: elementwise chains of a step are one launch.  The store of
    the paged path is not counted: its kernels read as much as contexts need, which shapes do not
    say.
    """

    def __init__(
        self, graph: Graph, rows: int, experts: Experts | None, chip: Chip, compiles: bool = False
    ) -> None:
        super().__init__(graph)
        self._store = set()  # MLX's operations may read it
        self.experts, self.chip = experts, chip
        self._used = used_experts(rows, *experts) if experts else 0.0
        self.nbytes: Counter[str] = Counter()
        kinds = {"weight": "weights", "kv": "K and V", "store": "store"}
        self._kind = {
            self._array(name).buffer: kinds.get(given.split()[0], "activations")
            for given, name in graph.arguments.items()
        }
        self._compiles, self._ranges = compiles, {}
        self._fused = fused_chains(graph) if compiles else {}

    def all_steps(self) -> tuple[Counter[str], Counter[str]]:
        """Launches by name, and bytes by kind."""
        names = [x.name for x in self.encoder.launches if x.name not in _SECOND_PASS]
        return Counter(n.removeprefix(MLX_S) for n in names), self.nbytes

    def _run(self, node: Node) -> None:
        for name in node.inputs:
            if name not in self.graph.maker:  # a constant
                self._array(name)
        if node.op == "SliceUpdate":
            self._write_rows(node)
        elif self._compiles and node.op == "Arange" and self._has_same(node):
            self._held[node.outputs[0]] = self._ranges[str(node.arguments)]
        elif node.op != "Broadcast" and self._is_swallowed(node):
            for name in node.outputs:
                self._new(name)
        else:
            super()._run(node)

    def _has_same(self, node: Node) -> bool:
        """A compiled step makes equal ranges once: here those of all steps."""
        key = str(node.arguments)
        if key in self._ranges:
            return True
        self._ranges[key] = self._new(node.outputs[0])
        return False

    def _is_swallowed(self, node: Node) -> bool:
        i = self.graph.maker[node.outputs[0]]
        return self._fused.get(i, i) != i

    def _kernel(self, node: Node) -> None:
        outputs = [self._new(name) for name in node.outputs]
        inputs = [(n, self._array(n)) for n in node.inputs]
        self._launch(
            node.label, [a if a.contiguous else self._copy(a, n) for n, a in inputs], outputs
        )
        self._moved(node, list(node.inputs))

    def _primitive(self, node: Node) -> None:
        inputs = list(self._outside(node))
        outputs = [self._new(name) for name in node.outputs]
        reads = _reads(self.graph, node, self.chip)
        if node.op == "Concatenate":
            with self.encoder.concurrently():
                for name in inputs:
                    self._launch(node.op, [self._array(name)], outputs)
        else:
            self._launch(node.label, [self._array(n) for n in inputs], outputs)
            if reads and reads.launches > 1:
                self._launch(f"{node.op}, sum", outputs, [])
                size = self.graph.shapes[node.outputs[0]].size
                self._count("activations", 2 * size * reads.partial)
        self._moved(node, inputs)

    def _outside(self, node: Node) -> Iterator[str]:
        """What a launch reads: the inputs of a chain that end in `node`."""
        for name in node.inputs:
            maker = self.graph.nodes[i] if (i := self.graph.maker.get(name)) is not None else None
            if maker and self._is_swallowed(maker):
                yield from self._outside(maker)
            else:
                yield name

    def _write_rows(self, node: Node) -> None:
        """A slice of a cache is written in place."""
        cache, rows, *_ = node.inputs
        self._held[node.outputs[0]] = self._array(cache)
        self._launch(node.op, [self._array(rows)], [self._array(cache)])
        nbytes = self.graph.shapes[rows].nbytes
        self._count("activations", nbytes)
        self._count(self._kind.get(self._array(cache).buffer, "activations"), nbytes)

    def run(self) -> "StepReplay":
        super().run()
        return self

    def _copy(self, a: Any, name: str) -> Any:
        self._count("activations", 2 * self.graph.shapes[name].nbytes)
        return super()._copy(a, name)

    def _moved(self, node: Node, inputs: list[str]) -> None:
        shapes = self.graph.shapes
        for name in dict.fromkeys(inputs):
            array = self._array(name)
            kind = self._kind.get(array.buffer, "activations")
            if kind == "store":
                continue
            nbytes = array.data_size * shapes[name].itemsize
            if kind == "weights":
                nbytes *= self._times(node, name)
            if node.op in ("Gather", "GatherAxis") and name == node.inputs[0]:
                nbytes = min(nbytes, shapes[node.outputs[0]].nbytes)
            self._count(kind, nbytes)
        for name in node.outputs:
            self._count("activations", shapes[name].nbytes)

    def _times(self, node: Node, name: str) -> float:
        """How often a launch asks for a weight."""
        if self.experts:
            count, dims = self.experts.count, self.graph.shapes[name].dims
            if node.op in ("GatherQMM", "GatherMM"):
                pairs, is_sorted = self.graph.shapes[node.inputs[-1]].size, node.arguments[-1]
                return gathered(pairs, self._used, count, is_sorted, node.op == "GatherQMM") / count
            if node.label.startswith(OURS) and len(dims) > 2 and dims[0] == count:
                return self._used / count
        reads = _reads(self.graph, node, self.chip)
        if reads is None:
            return 1.0
        # Matrices of heads are broadcast to all requests: each asks for its own.
        return reads.times * self.graph.shapes[name].size / self._array(name).data_size

    def _count(self, kind: str, nbytes: float) -> None:
        self.nbytes[kind] += nbytes


def _reads(graph: Graph, node: Node, chip: Chip) -> Reads | None:
    """Of each matrix of a product; None for other operations."""
    if node.op not in ("QuantizedMatmul", "Matmul", "AddMM"):
        return None
    x, w = (graph.shapes[name].dims for name in node.inputs[:2])
    inputs, outputs = x[-1], graph.shapes[node.outputs[0]].dims[-1]
    is_batch = math.prod(w[:-2]) > 1
    rows = x[-2] if is_batch else math.prod(x) // inputs
    if node.op == "QuantizedMatmul":
        group_size, _, mode, *_ = node.arguments
        mode = "mxfp4" if mode else "affine"
        reads = quantised(rows, inputs, outputs, mode, group_size, chip)
    else:
        reads = plain(rows, inputs, outputs, chip)
    return reads._replace(launches=1, partial=0) if is_batch else reads  # only one is split


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
