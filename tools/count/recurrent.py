"""Counts launches and bytes of one recurrent layer on Metal, mlx-lm's and ours, without a Mac.

    METAL_LITE_DEVICE=cpu PYTHONPATH=. python -m tools.count.recurrent --ours
    METAL_LITE_DEVICE=cpu PYTHONPATH=. python -m tools.count.recurrent --batch 8 --ops

A layer is the whole decoder layer, with its norms, residuals and MLP (Nemotron-H: the block of its
mixer).  Both engines' own code is recorded with the kernels that it has on Metal, and replayed on
MLX's Metal encoder (tests/support/metal_replay.py).  mlx-lm's layer is recorded by itself.  Ours is
what steps of a model with two such layers have more than those of a model with one.

What MLX and mlx-lm compile is one launch.  Bytes are those of the arrays that launches read and
write: weights, what the layer keeps of a request (in and out), and the rest.
"""

import argparse
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import gated_delta, lfm2, nemotron_h, qwen3_5, qwen3_next, ssm
from mlx_lm.models.cache import ArraysCache

from tests.support.metal_replay import Replay
from tests.support.mlx_graph import MLX_S, OURS, Eval, Graph, Node
from tests.support.recorded_steps import as_on_metal, fill, kernel_engine, record, stand_in
from tools.bench.lib.configs import SHAPES
from tools.bench.lib.models import random_model
from vllm_metal_lite.backend import mx
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.sampling_params import SamplingParams

KINDS = ("weights", "states", "the rest")
# Launches by name, and bytes by kind.
Row = tuple[Counter[str], Counter[str]]
# Kernels that use pools, and their parameters that are one.
KERNELS, POOLS = {"causal_conv", "gated_delta"}, {"states", "keys", "values"}
# The configuration with `recurrent` recurrent layers and one of attention.
_DEPTHS: dict[str, Callable[[int], dict[str, Any]]] = {
    "qwen3_5": lambda n: {"num_hidden_layers": n + 1, "full_attention_interval": n + 1},
    "lfm2": lambda n: {"num_hidden_layers": n + 1, "full_attn_idxs": [n]},
    "nemotron_h": lambda n: {"hybrid_override_pattern": list("M" * n + "*")},
}
_DEFAULT = ("qwen3.5-4b", "lfm2-1.2b", "nemotron-h-4b")


class Layer(NamedTuple):
    """make: the layer with weights that are never computed.  states: shapes and types of what it
    keeps of a request."""

    make: Callable[[], nn.Module]
    hidden: int
    states: tuple[tuple[tuple[int, ...], mx.Dtype], ...]


def _layers() -> dict[str, Layer]:
    """By name in SHAPES: those with recurrent layers."""
    found = {}
    for name, config in SHAPES.items():
        match config["model_type"]:
            case "qwen3_5":
                args: Any = qwen3_5.TextModelArgs.from_dict(config)
                make: Callable[[Any], nn.Module] = lambda a: qwen3_5.DecoderLayer(a, 0)  # noqa: E731
            case "lfm2":
                args = lfm2.ModelArgs.from_dict(config)
                make = lambda a: lfm2.Lfm2DecoderLayer(a, 0)  # noqa: E731
            case "nemotron_h":
                args = nemotron_h.ModelArgs.from_dict(config)
                make = lambda a: nemotron_h.NemotronHBlock(a, "M")  # noqa: E731
            case _:
                continue
        found[name] = Layer(partial(make, args), args.hidden_size, _states(args))
    return found


def _states(args: Any) -> tuple[tuple[tuple[int, ...], mx.Dtype], ...]:
    rows = mx.bfloat16
    if isinstance(args, lfm2.ModelArgs):
        return (((args.conv_L_cache - 1, args.hidden_size), rows),)
    if isinstance(args, nemotron_h.ModelArgs):
        heads, dim, size = args.mamba_num_heads, args.mamba_head_dim, args.ssm_state_size
        channels = heads * dim + 2 * args.n_groups * size
        return ((args.conv_kernel - 1, channels), rows), ((heads, dim, size), mx.float32)
    keys = args.linear_num_key_heads * args.linear_key_head_dim
    heads, dim = args.linear_num_value_heads, args.linear_value_head_dim
    return (
        ((args.linear_conv_kernel_dim - 1, 2 * keys + heads * dim), rows),
        ((heads, dim, args.linear_key_head_dim), mx.float32),
    )


@contextmanager
def compiled() -> Iterator[None]:
    """What mlx-lm and MLX compile is one launch each."""
    gates, dt, silu, gated = map(stand_in, ("compute_g", "compute_dt", "silu", "swiglu"))

    def swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
        return gated([h, gate, x], h.shape, h.dtype)

    with pytest.MonkeyPatch.context() as put:
        put.setattr(gated_delta, "compute_g", lambda _, a, b: gates([a, b], a.shape, mx.float32))
        put.setattr(ssm, "compute_dt", lambda d, b, _: dt([d, b], d.shape, mx.float32))
        put.setattr(nn, "silu", lambda x: silu([x], x.shape, x.dtype))
        put.setattr(qwen3_next, "precise_swiglu", swiglu)
        yield


@contextmanager
def on_metal() -> Iterator[None]:
    """mlx-lm's functions choose what they choose on Metal."""
    with pytest.MonkeyPatch.context() as put, compiled():
        as_on_metal(put)
        put.setattr(mx.metal, "is_available", lambda: True)
        put.setattr(mx, "default_device", lambda: mx.gpu)
        packed = gated_delta._make_gated_delta_packed_kernel()
        put.setattr(gated_delta, "_gated_delta_kernel_packed", packed)
        put.setattr(ssm, "_ssm_kernel", ssm.make_ssm_kernel())
        mx.disable_compile()  # an export knows no fused primitives
        try:
            yield
        finally:
            mx.enable_compile()


class Counted(Replay):
    """nbytes: of each step by kind of array, as launches read and write them."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.nbytes: defaultdict[int, Counter[str]] = defaultdict(Counter)
        kinds = {"weight": "weights", "state": "states"}
        self._kind = {
            self._array(name).buffer: kinds.get(given.split()[0], "the rest")
            for given, name in graph.arguments.items()
        }
        self._kept = set(graph.evals[0].wanted[1:]) if "state 0" in graph.arguments else set()

    def _run(self, node: Node) -> None:
        if node.kernel and not node.kernel.startswith((OURS, MLX_S)):
            self._kernel(node)  # of mlx-lm
        else:
            super()._run(node)

    def _kernel(self, node: Node) -> None:
        super()._kernel(node)
        self._moved(node)

    def _primitive(self, node: Node) -> None:
        super()._primitive(node)
        self._moved(node)

    def _moved(self, node: Node) -> None:
        pools = {node.parameters[name] for name in POOLS & node.parameters.keys()}
        for name in node.inputs:
            array = self._array(name)
            if name not in pools:
                self._count(name, array.data_size, self._kind.get(array.buffer, "the rest"))
        for name in node.outputs:
            kind = "states" if name in self._kept else "the rest"
            self._count(name, self.graph.shapes[name].size, kind)

    def _copy(self, a: Any, name: str) -> Any:
        self._count(name, 2 * self.graph.shapes[name].size, "the rest")
        return super()._copy(a, name)

    def _count(self, name: str, elements: int, kind: str) -> None:
        self.nbytes[len(self.steps)][kind] += elements * self.graph.shapes[name].itemsize

    def launches(self, step: int) -> Counter[str]:
        first = sum(s.launches for s in self.steps[:step])
        launches = self.encoder.launches[first : first + self.steps[step].launches]
        return Counter(_short(launch.name) for launch in launches)


def _short(name: str) -> str:
    """MLX appends template values and types to the name of a kernel."""
    given = re.match(r"custom_kernel_(\w+?)__?(?:bfloat16|float)", name)
    return given[1] if given else name.removeprefix(OURS).removeprefix(MLX_S)


def theirs(layer: Layer, batch: int, length: int, bits: int | None) -> Row:
    """mlx-lm's layer over (batch, length) rows that go on from states."""
    module = layer.make()
    module.eval()
    dtypes = {"A_log": mx.float32}
    parameters = [
        (path, w.astype(dtypes.get(path.rpartition(".")[2], mx.bfloat16)))
        for path, w in tree_flatten(module.parameters())
    ]
    module.update(tree_unflatten(parameters))
    if bits:
        nn.quantize(module, 64, bits)
    parameters = tree_flatten(module.parameters())
    kept = [mx.zeros((batch, *shape), dtype) for shape, dtype in layer.states]

    def run(x: mx.array, *arrays: mx.array) -> list[mx.array]:
        cache = ArraysCache(len(kept))
        cache.cache = list(arrays[: len(kept)])
        given = zip((path for path, _ in parameters), arrays[len(kept) :], strict=True)
        module.update(tree_unflatten(list(given)))
        return [module(x, None, cache), *cache.cache]

    events: list[dict[str, Any]] = []
    x = mx.zeros((batch, length, layer.hidden), mx.bfloat16)
    with on_metal():
        mx.export_function(events.append, run, x, *kept, *(a for _, a in parameters))
    graph = Graph()
    fill(graph, events)
    names = [n for n, *_ in next(e["inputs"] for e in events if e["type"] == "inputs")]
    given = [
        "rows",
        *(f"state {i}" for i in range(len(kept))),
        *(f"weight {p}" for p, _ in parameters),
    ]
    graph.arguments = dict(zip(given, names, strict=True))
    outputs = next(e["outputs"] for e in events if e["type"] == "outputs")
    graph.evals.append(Eval("layer", [n for n, *_ in outputs]))
    replay = Counted(graph)
    replay.run()
    return replay.launches(0), replay.nbytes[0]


def ours(name: str, batch: int, prompt: int, bits: int | None) -> tuple[Row, Row]:
    """A recurrent layer of this engine in (a decode of `batch`, a prompt): steps of a model with
    two such layers, less those of a model with one."""
    found: list[list[Row]] = []
    for recurrent in (1, 2):
        changes = {**_DEPTHS[SHAPES[name]["model_type"]](recurrent), "vocab_size": 512}
        model = random_model(name, mx.bfloat16, bits, **changes)
        blocks = -(-(prompt + 32 * (batch + 1)) // 16) + batch + 1
        config = EngineConfig(
            num_blocks=blocks, max_num_seqs=batch, max_num_batched_tokens=max(prompt, 16 * batch)
        )
        engine = kernel_engine(model, partial(LLMEngine, config=config))
        with compiled():
            graph = record(engine, partial(_drive, batch=batch, prompt=prompt), weights=True)
        replay = Counted(graph)
        replay.run()
        labels = [step.label for step in replay.steps]
        decode = max(i for i, label in enumerate(labels) if label.startswith("decode"))
        steps = (decode, labels.index("prompt"))
        found.append([(replay.launches(i), replay.nbytes[i]) for i in steps])
    (decode, prompted), (more_decode, more_prompted) = found
    states = sum(math.prod(shape) * dtype.size for shape, dtype in _layers()[name].states)
    return (
        _less(more_decode, decode, 2 * batch * states), _less(more_prompted, prompted, 2 * states)
    )  # fmt: skip


def _less(more: Row, fewer: Row, states: int) -> Row:
    """The kernels take pools of states, of which they move a slot in and out for a segment."""
    launches = Counter({k: n - fewer[0][k] for k, n in more[0].items() if n != fewer[0][k]})
    nbytes = Counter({kind: more[1][kind] - fewer[1][kind] for kind in KINDS})
    nbytes["states"] += states if KERNELS & launches.keys() else 0
    return launches, nbytes


def _drive(engine: LLMEngine, batch: int, prompt: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request("prompt", [9] * prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
    for i in range(batch):
        engine.add_request(str(i), [i] * 16, params)
    while engine.has_unfinished_requests():
        engine.step()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bits", type=int, help="of the weights; default: bfloat16")
    parser.add_argument("--batch", type=int, default=32, help="requests of a decode step")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--models", nargs="+", choices=list(_layers()), default=list(_DEFAULT))
    parser.add_argument("--ours", action="store_true", help="this engine too: a minute a model")
    parser.add_argument("--ops", action="store_true", help="list the launches")
    args = parser.parse_args(argv)
    print("| layer of | step | engine | launches | MiB: weights | states | the rest |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in args.models:
        layer = _layers()[name]
        steps = {
            f"decode of {args.batch}": (args.batch, 1),
            f"prompt of {args.prompt}": (1, args.prompt),
        }
        mine = ours(name, args.batch, args.prompt, args.bits) if args.ours else (None, None)
        for (step, size), row in zip(steps.items(), mine, strict=True):
            rows = {"mlx-lm": theirs(layer, *size, args.bits), "ours": row}
            for engine, found in rows.items():
                if found:
                    print_row(f"{name} | {step} | {engine}", found, args.ops)


def print_row(head: str, row: Row, ops: bool) -> None:
    launches, nbytes = row
    mib = " | ".join(f"{nbytes[kind] / 2**20:.1f}" for kind in KINDS)
    print(f"| {head} | {launches.total()} | {mib} |", flush=True)
    if ops:
        print("    " + ", ".join(f"{n} {label}" for label, n in launches.most_common()))


if __name__ == "__main__":
    main()
