"""Whole evals of a graph on a replay of MLX's Metal encoder.

`CustomKernel::eval_gpu` (mlx/backend/metal/custom_kernel.cpp) is followed exactly.  MLX's own
primitives are approximated:

- Views (`_VIEWS`) launch nothing and share their input's buffer.  A reshape of rows that are not
  contiguous copies.
- Every other primitive is one launch that takes its inputs and gives its outputs; a concatenation
  is a copy per input.  Elementwise chains are not fused, as `mx.compile` would.
- No output takes over the buffer of an input.
- The host never waits.  MLX does if it is 10 command buffers ahead, and commits once more then.

So counts of launches, barriers and commits are estimates.  Proofs do not rest on them: with
`tickets_only`, the encoder sees of each launch only its ticket, and the outputs of kernels that
take one.  More declared arrays only add barriers and fences.
"""

import math
from typing import NamedTuple

from tests.support.replay.encoder import NOTHING, Encoder, Limits, Truth
from tests.support.replay.graph import OURS, Graph, Node, Order, evaluation_order, touched

_VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Contiguous", "Copy", "Depends", "ExpandDims",
    "Flatten", "Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten",
    "View",
}  # fmt: skip
_RESHAPES = {"Contiguous", "Flatten", "Reshape", "Unflatten", "View"}


class _Held(NamedTuple):
    """An array on the device."""

    buffer: int
    data_size: int
    contiguous: bool = True


class Step(NamedTuple):
    """The command buffers that one eval ended."""

    label: str
    commits: int


class Replay:
    """Evaluates a graph on an Encoder, eval by eval.

    steps: of each eval that launches something.
    waits_after_errors: an eval that raises waits for its launches first, as MLX does from 0.32.2
        on; `mx.synchronize` waits too.
    """

    def __init__(
        self,
        graph: Graph,
        limits: Limits | None = None,
        *,
        tickets_only: bool = False,
        waits_after_errors: bool = True,
        order: Order = evaluation_order,
    ) -> None:
        self.graph, self.encoder = graph, Encoder(limits or Limits())
        self.tickets_only, self.waits_after_errors = tickets_only, waits_after_errors
        self._order = order
        self.steps: list[Step] = []
        self._held: dict[str, _Held] = {}
        self._buffers = 0
        self._store = {
            self._array(n).buffer
            for given, n in graph.arguments.items()
            if given.startswith("store")
        }

    def run(self) -> "Replay":
        done: set[int] = set()
        encoder = self.encoder
        for label, wanted, fails_after in self.graph.evals:
            launches, commits = len(encoder.launches), encoder.commits
            for i in self._order(self.graph, wanted, done)[:fails_after]:
                self._run(self.graph.nodes[i])
                encoder.end_primitive()
                done.add(i)
            if fails_after is None:
                encoder.end_eval()
            elif self.waits_after_errors:
                encoder.synchronize()
            if len(encoder.launches) > launches:
                self.steps.append(Step(label, encoder.commits - commits))
        return self

    def _run(self, node: Node) -> None:
        missing = [n for n in node.inputs if n in self.graph.maker and n not in self._held]
        assert not missing, f"{node.label} runs before its inputs"
        if node.label.startswith(OURS):
            self._kernel(node)
        elif node.op in _VIEWS:
            self._view(node)
        else:
            self._primitive(node)

    def _kernel(self, node: Node) -> None:
        """As `CustomKernel::eval_gpu`: fresh outputs; rows that are not contiguous are copied."""
        outputs = [self._new(name) for name in node.outputs]
        inputs = [
            a if a.contiguous else self._copy(a, name)
            for name, a in ((name, self._array(name)) for name in node.inputs)
        ]
        read, written = touched(node)
        truth = NOTHING
        if read:
            of_names = (frozenset(self._array(n).buffer for n in ns) for ns in (read, written))
            truth = Truth(*of_names, node.turn)
        if self.tickets_only:
            position = list(node.parameters).index("ticket") if read else None
            inputs = [] if position is None else [inputs[position]]
            outputs = outputs if read else []
        self._launch(node.label, inputs, outputs, truth)

    def _primitive(self, node: Node) -> None:
        inputs = [self._array(name) for name in node.inputs]
        outputs = [self._new(name) for name in node.outputs]
        if self._store & {a.buffer for a in inputs}:
            raise AssertionError(f"{node.label}, an operation of MLX, reads the store")
        if self.tickets_only:
            inputs, outputs = [], []
        if node.op == "Concatenate" and inputs:
            with self.encoder.concurrently():
                for a in inputs:
                    self._launch(node.op, [a], outputs)
        else:
            self._launch(node.label, inputs, outputs)

    def _launch(
        self, name: str, inputs: list[_Held], outputs: list[_Held], truth: Truth = NOTHING
    ) -> None:
        for a in inputs:
            self.encoder.take(a.buffer, a.data_size)
        for a in outputs:
            self.encoder.give(a.buffer, a.data_size)
        self.encoder.dispatch(name, truth)

    def _view(self, node: Node) -> None:
        for i, name in enumerate(node.outputs):
            source = node.inputs[i if node.op == "Depends" else 0]
            a, old, new = self._array(source), self.graph.shapes[source], self.graph.shapes[name]
            if node.op in _RESHAPES and not a.contiguous:
                self._held[name] = self._copy(a, source)
                continue
            size = a.data_size if node.op not in ("Slice", "Split") else math.prod(new)
            contiguous = a.contiguous and _stays_contiguous(node, old, new)
            self._held[name] = _Held(a.buffer, size, contiguous)

    def _copy(self, a: _Held, name: str) -> _Held:
        self._buffers += 1
        copy = _Held(self._buffers, math.prod(self.graph.shapes[name]))
        self._launch("copy", *([], []) if self.tickets_only else ([a], [copy]))
        self.encoder.add_temporary(copy.buffer)
        return copy

    def _array(self, name: str) -> _Held:
        """An array that is computed, or exists from the start."""
        return self._held.get(name) or self._new(name)

    def _new(self, name: str) -> _Held:
        self._buffers += 1
        self._held[name] = _Held(self._buffers, math.prod(self.graph.shapes[name]))
        return self._held[name]


def _stays_contiguous(node: Node, old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    match node.op:
        case "Transpose":
            axes = [axis for axis in node.arguments[0] if old[axis] > 1]
            return axes == sorted(axes)
        case "Broadcast" | "BroadcastAxes":
            return math.prod(old) == math.prod(new)
        case "Slice" | "Split":
            cut = next((i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b), 0)
            return math.prod(new[:cut]) == 1
        case "AsStrided":
            return False
    return True
