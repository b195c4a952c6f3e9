"""A graph of MLX's, the order in which MLX evaluates it, and what its kernels touch in truth.

The order is that of `eval_impl` in mlx/transforms.cpp (commit 846d176): the tape is built from the
results, breadth first with a width limit, and run from its end.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any, NamedTuple

from tests.support.kernels.table import TABLE

_BFS_MAX_WIDTH = 20
OURS = "metal_lite_"
# Stand-ins for MLX's fused functions, which a CPU's graph would spell out.
MLX_S = "mlx_"
# The end of a kernel's name, and the template value that counts launches, in recordings.
END, TURN = "END", "TURN"


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


# Kernels that write the store or a state store.  Only `paged_decode` has uses with and without.
WRITERS, WRITES_IF_FUSED, READERS = (
    {kernel for kernel, row in TABLE.items() if row.store == how}
    for how in ("writes", "writes if fused", "reads")
)


def touched(node: Node) -> tuple[set[str], set[str]]:
    """(read, written): the store arrays that a kernel touches in truth; a writer reads too."""
    kernel = (node.kernel or "").removeprefix(OURS)
    if "ticket" not in node.parameters:
        return set(), set()
    names = {"keys", "values", "states"} & node.parameters.keys()
    store = {node.parameters[name] for name in names}
    assert kernel in WRITERS | WRITES_IF_FUSED | READERS, (
        f"{kernel} has no `store` in tests/support/kernels/*_runs.py"
    )
    late = kernel in WRITES_IF_FUSED and node.template["FUSED"] not in ("0", "false")
    return store, store if kernel in WRITERS or late else set()


class Eval(NamedTuple):
    """One call of `mx.async_eval`.  fails_after: the primitives that run before one raises.

    `mx.synchronize` is an eval of nothing with a fails_after of 0: both wait for what runs.
    """

    label: str
    wanted: list[str]
    fails_after: int | None = None


@dataclass
class Graph:
    """Shapes by name, primitives, and evals in order.

    arguments: arrays that exist from the start, by the name that was given to them.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
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
