"""Counts launches and bytes of one recurrent layer on Metal, mlx-lm's side, without a Mac.

    METAL_LITE_DEVICE=cpu PYTHONPATH=. python tools/count_recurrent.py
    METAL_LITE_DEVICE=cpu PYTHONPATH=. python tools/count_recurrent.py --batch 8 --ops

A layer is the whole decoder layer, with its norms, residuals and MLP (Nemotron-H: the block of its
mixer).  mlx-lm's own code is recorded with the kernels that it has on Metal, and replayed on MLX's
Metal encoder (tests/support/metal_replay.py).  Nothing is computed.  What `mx.compile` fuses there
is one launch.  Bytes are those of the arrays that launches read and write: weights, what the layer
keeps of a request (in and out), and the rest.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import gated_delta, lfm2, nemotron_h, qwen3_5, qwen3_next, ssm
from mlx_lm.models.cache import ArraysCache

sys.path.insert(0, str(Path(__file__).parent))
from serving_models import SHAPES

from tests.support.metal_replay import Replay
from tests.support.mlx_graph import MLX_S, Eval, Graph, Node
from tests.support.recorded_steps import as_on_metal, fill, stand_in
from vllm_metal_lite.backend import mx


class Layer(NamedTuple):
    """make: the layer with weights that are never computed.  states: shapes and types of what it
    keeps of a request."""

    make: Callable[[], nn.Module]
    hidden: int
    states: tuple[tuple[tuple[int, ...], mx.Dtype], ...]


def _layers() -> dict[str, Layer]:
    qwen = qwen3_5.TextModelArgs.from_dict(SHAPES["qwen3.5-4b"])
    conv = lfm2.ModelArgs.from_dict(SHAPES["lfm2-1.2b"])
    mamba = nemotron_h.ModelArgs.from_dict(SHAPES["nemotron-h-4b"])
    return {
        "qwen3.5-4b": Layer(lambda: qwen3_5.DecoderLayer(qwen, 0), qwen.hidden_size, _states(qwen)),
        "lfm2-1.2b": Layer(lambda: lfm2.Lfm2DecoderLayer(conv, 0), conv.hidden_size, _states(conv)),
        "nemotron-h-4b": Layer(
            lambda: nemotron_h.NemotronHBlock(mamba, "M"), mamba.hidden_size, _states(mamba)
        ),
    }


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
def _on_metal() -> Iterator[None]:
    """mlx-lm's functions choose what they choose on Metal; compiled ones are one launch each."""
    gates, dt, silu, gated = map(stand_in, ("compute_g", "compute_dt", "silu", "swiglu"))
    with pytest.MonkeyPatch.context() as put:
        as_on_metal(put)
        put.setattr(mx.metal, "is_available", lambda: True)
        put.setattr(mx, "default_device", lambda: mx.gpu)
        packed = gated_delta._make_gated_delta_packed_kernel()
        put.setattr(gated_delta, "_gated_delta_kernel_packed", packed)
        put.setattr(ssm, "_ssm_kernel", ssm.make_ssm_kernel())
        put.setattr(gated_delta, "compute_g", lambda _, a, b: gates([a, b], a.shape, mx.float32))
        put.setattr(ssm, "compute_dt", lambda d, b, _: dt([d, b], d.shape, mx.float32))
        put.setattr(nn, "silu", lambda x: silu([x], x.shape, x.dtype))
        swiglu = lambda h, g, x: gated([h, g, x], h.shape, h.dtype)  # noqa: E731
        put.setattr(qwen3_next, "precise_swiglu", swiglu)
        mx.disable_compile()  # an export knows no fused primitives
        try:
            yield
        finally:
            mx.enable_compile()


class Counted(Replay):
    """nbytes: by kind of array, as launches read and write them."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.nbytes: Counter[str] = Counter()
        self._kind = {
            self._array(name).buffer: "weights" if given.startswith("weight") else "states"
            for given, name in graph.arguments.items() if not given.startswith("rows")
        }  # fmt: skip
        self._kept = set(graph.evals[0].wanted[1:])  # the new states

    def _run(self, node: Node) -> None:
        if node.kernel and not node.kernel.startswith(MLX_S):
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
        for name in node.inputs:
            array = self._array(name)
            self._count(name, array.data_size, self._kind.get(array.buffer, "the rest"))
        for name in node.outputs:
            self._count(
                name, self.graph.shapes[name].size, "states" if name in self._kept else "the rest"
            )

    def _copy(self, a: Any, name: str) -> Any:
        self._count(name, 2 * self.graph.shapes[name].size, "the rest")
        return super()._copy(a, name)

    def _count(self, name: str, elements: int, kind: str) -> None:
        self.nbytes[kind] += elements * self.graph.shapes[name].itemsize


def count(layer: Layer, batch: int, length: int, bits: int | None) -> Counted:
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
    with _on_metal():
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
    return Counted(graph).run()


def _short(name: str) -> str:
    """MLX appends template values and types to the name of a kernel."""
    given = re.match(r"custom_kernel_(\w+?)__?(?:bfloat16|float)", name)
    return given[1] if given else name


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bits", type=int, help="of the weights; default: bfloat16")
    parser.add_argument("--batch", type=int, default=32, help="requests of a decode step")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--ops", action="store_true", help="list the launches")
    args = parser.parse_args(argv)
    print("| layer of | step | launches | MiB: weights | states | the rest |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, layer in _layers().items():
        for batch, length in ((args.batch, 1), (1, args.prompt)):
            found = count(layer, batch, length, args.bits)
            step = f"decode of {batch}" if length == 1 else f"prompt of {length}"
            kinds = ("weights", "states", "the rest")
            mib = " | ".join(f"{found.nbytes[kind] / 2**20:.1f}" for kind in kinds)
            print(f"| {name} | {step} | {found.steps[0].launches} | {mib} |")
            if args.ops:
                labels = Counter(_short(launch.name) for launch in found.encoder.launches)
                print("    " + ", ".join(f"{n} {label}" for label, n in labels.most_common()))


if __name__ == "__main__":
    main()
