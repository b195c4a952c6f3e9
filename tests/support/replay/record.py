"""Records the graph of whole steps of an engine, as it would be built on a Mac, on any machine.

The engine runs inside `mx.export_function`, where MLX records custom Metal kernels without a GPU.
Nothing is computed: reading a step's tokens gives the same token always, and each `mx.async_eval`
is noted.  What `mx.compile` would trace is recorded uncompiled.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mlx_lm.models import activations

from tests.support.replay.graph import END, MLX_S, OURS, TURN, Eval, Graph, Node
from vllm_metal_lite import backend
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.forward_batch import ForwardBatch
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.fusion.launches import fuse
from vllm_metal_lite.kernels.launch import Kernel, placeholder
from vllm_metal_lite.model.packed import Fusion
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.runner.runner import ModelRunner
from vllm_metal_lite.runner.step_path import StepPath

TOKEN = 7
_SWIGLU = activations.swiglu


def use_kernels(
    made: LLMEngine, prefill: str = "varlen", fusion: Fusion | None = None
) -> LLMEngine:
    """The engine with kernels, unchecked.  fusion: None: of all that can be fused, which changes
    the model in place."""
    store, shapes = made.runner.attention.store, made.model.attention_shapes
    attention = KernelAttention(store, prefill, shapes)
    path = StepPath(attention, fusion=fusion or fuse(made.model.packed.model, joins=True))
    made.in_flight.pipeline.runner = ModelRunner(made.model.packed, path, made.runner.sampler)
    return made


def record(
    engine: LLMEngine, drive: Callable[[LLMEngine], Any], *, fails: dict[int, int] | None = None
) -> Graph:
    """The graph of everything that `drive(engine)` submits.

    The engine is of no use afterwards.  fails: submitted step (from 0) -> the primitives that MLX
    runs before it raises RuntimeError.
    """
    graph, steps = Graph(), _Steps(fails or {})
    store = engine.runner.attention.store
    given: dict[str, mx.array] = {}
    places: dict[int, str] = {}  # layers may share arrays
    for kind in ("keys", "values"):
        for layer, array in enumerate(getattr(store, kind)):
            name = places.setdefault(id(array), f"store {kind} {layer}")
            given[name] = array

    def run(*arrays: mx.array) -> list[mx.array]:
        of = dict(zip(given, arrays, strict=True))
        for kind in ("keys", "values"):
            arrays_of = getattr(store, kind)
            setattr(store, kind, [of[places[id(a)]] for a in arrays_of])
        drive(engine)
        return [a for _, arrays, _ in steps.evals for a in arrays]

    events: list[dict[str, Any]] = []
    with steps.noted():
        mx.export_function(events.append, run, *given.values())
    fill(graph, events)
    inputs = next(e["inputs"] for e in events if e["type"] == "inputs")
    graph.arguments = dict(zip(given, (n for n, *_ in inputs), strict=True))
    results = (n for n, *_ in next(e["outputs"] for e in events if e["type"] == "outputs"))
    for label, arrays, fails_after in steps.evals:
        graph.evals.append(Eval(label, list(itertools.islice(results, len(arrays))), fails_after))
    return graph


def fill(graph: Graph, events: Sequence[dict[str, Any]]) -> None:
    for event in events:
        for kind in ("inputs", "outputs"):
            for name, dims, _ in event.get(kind, ()):
                graph.shapes[name] = tuple(dims)
        for name, array in event.get("constants", ()):
            graph.shapes[name] = tuple(array.shape)
        if event["type"] == "primitive":
            names = (tuple(n for n, *_ in event[kind]) for kind in ("inputs", "outputs"))
            graph.nodes.append(Node(event["name"], *names, event["arguments"]))


class _Steps:
    """Notes evals, each under the name of its step, and the turns of kernels."""

    def __init__(self, fails: dict[int, int]) -> None:
        self.evals: list[tuple[str, list[mx.array], int | None]] = []
        self._fails, self._submitted = fails, itertools.count()
        self._label = "eval"
        self._turns = itertools.count(1)

    @contextmanager
    def noted(self) -> Iterator[None]:
        placeholder()  # remembered by the process: not to be made of tracers
        with pytest.MonkeyPatch.context() as patch:
            as_on_metal(patch)
            self._evaluate = mx.eval
            patch.setattr(mx, "eval", self._eval)
            patch.setattr(mx, "async_eval", self._async_eval)
            patch.setattr(mx, "synchronize", self._synchronize)
            patch.setattr(StepResult, "wait", lambda result: setattr(result, "done", True))
            patch.setattr(StepResult, "_reported", property(_reported))
            patch.setattr(ModelRunner, "execute", self._labelling(ModelRunner.execute))
            patch.setattr(Kernel, "__call__", self._taking_turns(Kernel.__call__))
            patch.setattr(Kernel, "_launcher", _launcher)
            mx.disable_compile()  # an export knows no fused primitives
            try:
                yield
            finally:
                mx.enable_compile()

    def _async_eval(self, *trees: Any) -> None:
        fails_after = self._fails.get(next(self._submitted))
        self.evals.append((self._label, _arrays(trees), fails_after))
        if fails_after is not None:
            raise RuntimeError("a kernel does not compile")

    def _synchronize(self) -> None:
        self.evals.append(("synchronize", [], 0))

    def _eval(self, *trees: Any) -> None:
        try:
            self._evaluate(*trees)
        except ValueError:  # a result of this recording
            self.evals.append(("eval", _arrays(trees), None))

    def _labelling(self, execute: Callable) -> Callable:
        def run(runner: ModelRunner, batch: ForwardBatch, *args: Any, **kwargs: Any) -> StepResult:
            after = args[2] if len(args) > 2 else kwargs.get("after")
            self._label = _label(batch, after)
            return execute(runner, batch, *args, **kwargs)

        return run

    def _taking_turns(self, call: Callable) -> Callable:
        def launch(
            kernel: Kernel, arrays: Any, template: Any, *args: Any, **kwargs: Any
        ) -> list[mx.array]:
            return call(kernel, arrays, {**template, TURN: next(self._turns)}, *args, **kwargs)

        return launch


def _arrays(trees: Any) -> list[mx.array]:
    return [a for a in backend.leaves(list(trees)) if isinstance(a, mx.array)]


def _launcher(kernel: Kernel) -> Any:
    return mx.fast.metal_kernel(
        name=f"{OURS}{kernel.name}_{END}",
        input_names=kernel.inputs,
        output_names=kernel.outputs,
        source=" ",
    )


def _label(batch: ForwardBatch, after: StepResult | None) -> str:
    decodes, prompts = batch.num_decodes, batch.num_segments - batch.num_decodes
    words = ["decode"] if not prompts else ["mixed"] if decodes else ["prompt"]
    if after is not None and not after.done:
        words.append("ahead")
    return " ".join(words)


def _reported(result: StepResult) -> np.ndarray:
    result.wait()
    count = 0 if result.output is None else len(result.batch.sample_segments)
    return np.full(count, TOKEN, np.int32)


def as_on_metal(patch: pytest.MonkeyPatch) -> None:
    """Plans are Metal's; MLX's fused functions are one launch each, and kernels get names."""
    patch.setattr(backend, "name", lambda: "metal")
    for name in ("rms_norm", "layer_norm", "rope"):
        patch.setattr(mx.fast, name, _one_launch(name))
    patch.setattr(mx.fast, "scaled_dot_product_attention", _one_launch("sdpa", _shape_of_sdpa))
    swiglu = _one_launch("swiglu")  # compiled by mlx-lm
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models") and getattr(module, "swiglu", None) is _SWIGLU:
            patch.setattr(module, "swiglu", swiglu)
    patch.setattr(mx, "contiguous", _one_launch("contiguous"))  # an export refuses the real one


def _one_launch(
    name: str, shape_of: Callable[..., tuple[int, ...]] = lambda x, *_: x.shape
) -> Callable[..., mx.array]:
    """A stand-in for a function of MLX: one launch that takes its arrays and returns one of shape
    `shape_of(*arrays)`, with the dtype of the first."""
    kernels: dict[int, Any] = {}

    def call(*args: Any, **kwargs: Any) -> mx.array:
        arrays = [a for a in (*args, *kwargs.values()) if isinstance(a, mx.array)]
        count = len(arrays)
        if count not in kernels:
            options = {"output_names": ["out"], "source": " ", "ensure_row_contiguous": False}
            kernels[count] = mx.fast.metal_kernel(
                name=f"{MLX_S}{name}_{END}", input_names=[f"a{i}" for i in range(count)], **options
            )
        how = {"output_shapes": [shape_of(*arrays)], "output_dtypes": [arrays[0].dtype]}
        return kernels[count](inputs=arrays, grid=(1, 1, 1), threadgroup=(1, 1, 1), **how)[0]

    return call


def _shape_of_sdpa(q: mx.array, _: mx.array, v: mx.array, *others: mx.array) -> tuple[int, ...]:
    return *q.shape[:-1], v.shape[-1]
