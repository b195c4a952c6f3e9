"""MLX's evaluation of a graph on Metal: the order of its primitives, and what each one declares.

The order is that of `eval_impl` in mlx/transforms.cpp (breadth first with a width limit of 20, last
array first).  `CustomKernel::eval_gpu` (mlx/backend/metal/custom_kernel.cpp) is followed exactly.
MLX's own primitives are approximated:

- Views (`_VIEWS`) launch nothing and share their input's buffer.  A reshape of rows that are not
  contiguous copies.
- Every other primitive is one launch that takes its inputs and gives its outputs; a concatenation
  is a copy per input.  Elementwise chains are not fused, as `mx.compile` would.
- No output takes over the buffer of an input.

So counts of launches, barriers and commits are estimates.  Proofs do not rest on them: with
`tokens_only`, the encoder sees of each launch no arrays but the token that the launch takes and the
outputs of kernels that take one.  More declared arrays only add barriers and fences.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any, NamedTuple

from tests.support.metal_encoder import NOTHING, Encoder, Limits, Truth

_BFS_MAX_WIDTH = 20
_MAX_ACTIVE_TASKS = 10
OURS = "metal_lite_"
# Stand-ins for MLX's fused functions, which a CPU's graph would spell out.
MLX_S = "mlx_"
# The end of a kernel's name, and the template value that counts launches, in recordings.
END, TURN = "END", "TURN"

_VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Contiguous", "Copy", "Depends", "ExpandDims",
    "Flatten", "Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten",
    "View",
}  # fmt: skip
_RESHAPES = {"Contiguous", "Flatten", "Reshape", "Unflatten", "View"}


class Shape(NamedTuple):
    dims: tuple[int, ...]
    itemsize: int

    @property
    def size(self) -> int:
        return math.prod(self.dims)


@dataclass(frozen=True)
class Node:
    """A primitive, with the names of its inputs and outputs."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: Sequence[Any]

    @cached_property
    def kernel(self) -> str | None:
        """The name of a custom kernel, None for other primitives."""
        if self.op != "CustomKernel":
            return None
        # MLX appends template values and the arrays' types.
        given = re.match(rf"custom_kernel_((?:{OURS}|{MLX_S})\w+?)_{END}", self.arguments[0])
        return given[1] if given else self.arguments[0]

    @property
    def label(self) -> str:
        return self.kernel or self.op

    @property
    def turn(self) -> int:
        """The place of a custom kernel among all that were called."""
        return int(self.template.get(TURN, 0))

    @cached_property
    def template(self) -> dict[str, str]:
        """Template values of a custom kernel, as in its source."""
        if self.kernel is None:
            return {}
        source = self.arguments[1]
        names = re.findall(r"template <([^>]*)>\n\[\[kernel\]\]", source)
        values = re.findall(r"decltype\(\w+<(.*)>\) ", source)
        if not names:
            return {}
        parameters = [parameter.split()[-1] for parameter in names[-1].split(",")]
        return dict(zip(parameters, (v.strip() for v in values[-1].split(",")), strict=True))

    @cached_property
    def parameters(self) -> dict[str, str]:
        """Array names of a custom kernel's inputs, by the names of its parameters."""
        if self.kernel is None:
            return {}
        signature = self.arguments[1].rpartition("[[kernel]] void ")[2]
        names = re.findall(r"const (?:device|constant) \w+[*&] (\w+) \[\[buffer", signature)
        asked = {f"{name}_{suffix}" for name in names for suffix in ("shape", "strides", "ndim")}
        return dict(zip((n for n in names if n not in asked), self.inputs, strict=True))


# Kernels that write the store; `paged_decode` does if FUSED, and is the only one to decide so.
WRITERS = {"kv_write", "kv_write_quantised", "rope_write"}
WRITES_IF_FUSED = {"paged_decode"}
READERS = {"kv_gather", "kv_gather_quantised", "shared_prefix", "varlen_prefill"}


def touched(node: Node) -> tuple[set[str], set[str]]:
    """(read, written): the store arrays that a kernel of this project touches in truth.

    A kernel that writes counts as a reader too.
    """
    kernel = (node.kernel or "").removeprefix(OURS)
    if "token" not in node.parameters:
        return set(), set()
    store = {node.parameters[name] for name in ("keys", "values")}
    assert kernel in WRITERS | WRITES_IF_FUSED | READERS, f"{kernel} is not in the lists above"
    late = kernel in WRITES_IF_FUSED and node.template["FUSED"] not in ("0", "false")
    return store, store if kernel in WRITERS or late else set()


class Eval(NamedTuple):
    """One call of `mx.async_eval`.  fails_after: the primitives that run before one raises."""

    label: str
    wanted: list[str]
    fails_after: int | None = None


@dataclass
class Graph:
    """Shapes by name, primitives, and evals in order.

    arguments: arrays that exist from the start, by the name that was given to them.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    evals: list[Eval] = field(default_factory=list)

    @cached_property
    def maker(self) -> dict[str, int]:
        return {name: i for i, node in enumerate(self.nodes) for name in node.outputs}


# (graph, names of wanted arrays, nodes that ran before) -> the nodes to run, in order
Order = Callable[[Graph, Sequence[str], set[int]], list[int]]


def evaluation_order(graph: Graph, wanted: Sequence[str], done: set[int]) -> list[int]:
    """The nodes that an eval of `wanted` runs, in order; `done` ran before."""

    def makers(names: Sequence[str]) -> list[int]:
        return [graph.maker[n] for n in names if graph.maker.get(n, -1) not in done | {-1}]

    root = -1
    inputs = {root: makers(wanted)}
    degree: dict[int, int] = {}
    stack = [root]
    while stack:
        for i in inputs[stack.pop()]:
            if i not in degree:
                degree[i] = 0
                inputs[i] = makers(graph.nodes[i].inputs)
                stack.append(i)
            degree[i] += 1
    tape, at = [root], 0
    later: list[tuple[int, int]] = []
    while degree and (at < len(tape) or later):
        if at < len(tape):
            node, start = tape[at], 0
            at += 1
        else:
            node, start = later.pop()
        for j in range(start, len(inputs[node])):
            if len(tape) - at >= _BFS_MAX_WIDTH:
                later.append((node, j))
                break
            i = inputs[node][j]
            degree[i] -= 1
            if not degree[i]:
                del degree[i]
                tape.append(i)
    return tape[:0:-1]


def any_order(seed: int) -> Order:
    """A random order in which every node runs after its inputs, instead of MLX's order."""
    rng = Random(seed)

    def order(graph: Graph, wanted: Sequence[str], done: set[int]) -> list[int]:
        needed = set(evaluation_order(graph, wanted, done))
        waits = {i: {graph.maker.get(n) for n in graph.nodes[i].inputs} & needed for i in needed}
        runs = []
        while waits:
            ready = sorted(i for i, inputs in waits.items() if not inputs & waits.keys())
            runs.append(rng.choice(ready))
            del waits[runs[-1]]
        return runs

    return order


class _Held(NamedTuple):
    """An array on the device."""

    buffer: int
    data_size: int
    contiguous: bool = True


class Step(NamedTuple):
    """What one eval did.  held: the most bytes of its results that exist at once if the GPU is
    slower than the host: a result lives until a command buffer after its last use is done, and the
    host goes at most `_MAX_ACTIVE_TASKS` command buffers ahead."""

    label: str
    launches: int
    barriers: int
    commits: int
    held: int


class Replay:
    """Evaluates a graph on an Encoder, eval by eval.

    steps: of each eval that launches something.
    waits_after_errors: an eval that raises waits for its launches first, as MLX does from 0.32.2
    on.
    """

    def __init__(
        self, graph: Graph, limits: Limits | None = None, *, tokens_only: bool = False,
        waits_after_errors: bool = True, order: Order = evaluation_order,
    ) -> None:  # fmt: skip
        self.graph, self.encoder = graph, Encoder(limits or Limits())
        self.tokens_only, self.waits_after_errors = tokens_only, waits_after_errors
        self._order = order
        self.steps: list[Step] = []
        self._held: dict[str, _Held] = {}
        self._buffers = 0
        self._store = {self._array(n).buffer for given, n in graph.arguments.items()
                       if given.startswith("store")}  # fmt: skip

    def run(self) -> "Replay":
        done: set[int] = set()
        encoder = self.encoder
        for label, wanted, fails_after in self.graph.evals:
            before = len(encoder.launches), encoder.barriers, encoder.commits
            order = self._order(self.graph, wanted, done)[:fails_after]
            in_buffer = []  # the command buffer of each primitive
            for i in order:
                self._run(self.graph.nodes[i])
                in_buffer.append(encoder.commits)
                encoder.end_primitive()
                done.add(i)
            if fails_after is None:
                encoder.end_eval()
            elif self.waits_after_errors:
                encoder.synchronize()
            after = len(encoder.launches), encoder.barriers, encoder.commits
            launches, barriers, commits = (b - a for a, b in zip(before, after, strict=True))
            if launches:
                held = self._most_held(order, in_buffer)
                self.steps.append(Step(label, launches, barriers, commits, held))
        return self

    def _most_held(self, order: list[int], in_buffer: list[int]) -> int:
        size: dict[int, int] = {}
        last_use: dict[int, int] = {}
        made_in: dict[int, int] = {}
        for i, place in zip(order, in_buffer, strict=True):
            node = self.graph.nodes[i]
            for name in (*node.inputs, *node.outputs):
                buffer = self._held[name].buffer
                if name in node.outputs and node.op not in _VIEWS:
                    made_in[buffer] = place
                    size[buffer] = self.graph.shapes[name].size * self.graph.shapes[name].itemsize
                last_use[buffer] = place
        held = [0] * (in_buffer[-1] + 1 if in_buffer else 0)
        for buffer, made in made_in.items():
            for at in range(made, min(last_use[buffer] + 1 + _MAX_ACTIVE_TASKS, len(held))):
                held[at] += size[buffer]
        return max(held, default=0)

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
        if self.tokens_only:
            position = list(node.parameters).index("token") if read else None
            inputs = [] if position is None else [inputs[position]]
            outputs = outputs if read else []
        self._launch(node.label, inputs, outputs, truth)

    def _primitive(self, node: Node) -> None:
        inputs = [self._array(name) for name in node.inputs]
        outputs = [self._new(name) for name in node.outputs]
        if self._store & {a.buffer for a in inputs}:
            raise AssertionError(f"{node.label}, an operation of MLX, reads the store")
        if self.tokens_only:
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
            size = a.data_size if node.op not in ("Slice", "Split") else new.size
            contiguous = a.contiguous and _stays_contiguous(node, old.dims, new.dims)
            self._held[name] = _Held(a.buffer, size, contiguous)

    def _copy(self, a: _Held, name: str) -> _Held:
        self._buffers += 1
        copy = _Held(self._buffers, self.graph.shapes[name].size)
        self._launch("copy", *([], []) if self.tokens_only else ([a], [copy]))
        self.encoder.add_temporary(copy.buffer)
        return copy

    def _array(self, name: str) -> _Held:
        """An array that is computed, or exists from the start."""
        return self._held.get(name) or self._new(name)

    def _new(self, name: str) -> _Held:
        self._buffers += 1
        self._held[name] = _Held(self._buffers, self.graph.shapes[name].size)
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
