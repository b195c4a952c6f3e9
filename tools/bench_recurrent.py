"""Measure the kernels of recurrent layers on this GPU, beside MLX's and mlx-lm's operations.

    python tools/bench_recurrent.py            everything
    python tools/bench_recurrent.py --tiny     small shapes, to try the tool on a CPU

Prints Markdown.  tests/kernels/test_{causal_conv,gated_delta,ssm}.py say whether they are right.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import mlx.nn as nn
import numpy as np
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops
from mlx_lm.models.ssm import ssm_attn
from run_main import run_main

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import measure
from vllm_metal_lite.kernels.causal_conv import causal_conv, plan_conv_tiles
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.gated_delta import gated_delta
from vllm_metal_lite.kernels.new_rows import Columns
from vllm_metal_lite.kernels.segments import plan_segments
from vllm_metal_lite.kernels.ssm import ssm_update

Launch = Callable[[mx.array], mx.array]  # of a token, to the next one


class Layer(NamedTuple):
    """The recurrent layer of a model; columns: of its convolution."""

    model: str
    kind: str  # scalar or vector gates of the delta rule, or ssm
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    columns: int


LAYERS = (
    Layer("Qwen3.5-4B", "scalar", 16, 32, 128, 128, 8192),
    Layer("Kimi Linear", "vector", 32, 32, 128, 128, 4096),
    Layer("Nemotron-H-8B", "ssm", 8, 128, 128, 64, 10240),
)
TINY = tuple(Layer(f"tiny {kind}", kind, 1, 2, 16, 8, 32) for kind in ("scalar", "vector", "ssm"))


def draw(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape, dtype, scale=shape[-1] ** -0.5)


class Step:
    """Segments of some lengths, and the inputs of a layer for them."""

    def __init__(self, layer: Layer, lengths: list[int]) -> None:
        self.layer, self.rows, self.max_seqlen = layer, sum(lengths), max(lengths)
        slots = np.random.default_rng(0).permutation(len(lengths))
        segments = plan_segments(np.cumsum([0, *lengths]), slots, slots, self.rows, len(slots))
        self.segments, self.tiles = mx.array(segments), mx.array(plan_conv_tiles(segments))
        rows, heads = self.rows, layer.v_heads
        self.q, self.k = (draw(rows, layer.k_heads, layer.k_dim) for _ in range(2))
        self.v = draw(rows, heads, layer.v_dim)
        wide = layer.kind == "vector"
        gates = (rows, heads, layer.k_dim) if wide else (rows, heads)
        self.gates = mx.random.uniform(0.5, 1, gates)
        self.beta = mx.random.uniform(0, 1, (rows, heads))
        self.states = mx.zeros((len(lengths), heads, layer.v_dim, layer.k_dim))
        self.x, self.carried = draw(rows, layer.columns), draw(len(lengths), 3, layer.columns)
        self.weight, self.bias = draw(layer.columns, 4), draw(layer.columns)
        self.a = -mx.random.uniform(0.1, 1, (heads,))
        mx.eval([a for a in vars(self).values() if isinstance(a, mx.array)])

    def recurrence(self, max_seqlen: int) -> Launch:
        flat = [Columns(a.reshape(self.rows, -1), 0) for a in (self.q, self.k, self.v)]
        heads = self.layer.k_heads

        def launch(token: mx.array) -> mx.array:
            if self.layer.kind == "ssm":
                return ssm_update(
                    flat[2], flat[1], flat[0], self.beta, self.a, self.a, self.states,
                    self.segments, token, num_groups=heads, max_seqlen=max_seqlen,
                )[1]  # fmt: skip
            return gated_delta(
                *flat, self.gates, self.beta, self.states, self.segments, token,
                num_k_heads=heads, max_seqlen=max_seqlen,
            )[1]  # fmt: skip

        return launch

    def convolution(self) -> Launch:
        return lambda token: causal_conv(
            Columns(self.x, 0), self.weight, self.bias, self.carried, self.segments, self.tiles,
            token, silu=True,
        )[1]  # fmt: skip


def decodes(layers: tuple[Layer, ...], batches: tuple[int, ...]) -> None:
    """A row a request: the states in and out are the cost."""
    print("\n## Decodes, bfloat16, float32 states\n")
    print("| layer | requests | recurrence us | GB/s of states | mlx-lm us | convolution us |")
    print("| --- | --- | --- | --- | --- | --- |")
    for layer in layers:
        for batch in batches:
            step = Step(layer, [1] * batch)
            ours = measure.seconds_per_call(step.recurrence(1), new_token())
            conv = measure.seconds_per_call(step.convolution(), new_token())
            theirs = measure.seconds_per_call(_mlx_lm(step), step.states, chain=10)
            print(f"| {layer.model} | {batch} | {1e6 * ours:.1f} "
                  f"| {2 * step.states.nbytes / ours / 1e9:,.0f} | {1e6 * theirs:.1f} "
                  f"| {1e6 * conv:.1f} |", flush=True)  # fmt: skip


def prompts(layers: tuple[Layer, ...], steps: tuple[list[int], ...]) -> None:
    """Long segments: by chunks and row by row."""
    print("\n## Prompts, bfloat16, us\n")
    print("| layer | segments | chunks | row by row | MLX's | convolution | MLX's |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for layer in layers:
        for lengths in steps:
            step = Step(layer, lengths)
            times = [
                measure.seconds_per_call(launch, new_token(), chain=2)
                for launch in (step.recurrence(step.max_seqlen), step.recurrence(1))
            ]
            times.append(measure.seconds_per_call(_mlx(step), step.states, chain=2))
            times.append(measure.seconds_per_call(step.convolution(), new_token(), chain=2))
            times.append(measure.seconds_per_call(_mlx_conv(step), step.x[None], chain=2))
            shown = " | ".join(f"{1e6 * t:,.0f}" for t in times)
            print(f"| {layer.model} | {len(lengths)} of {lengths[0]} | {shown} |", flush=True)


def _batch(step: Step) -> list[mx.array]:
    """The inputs as batches of one length."""
    shape = (len(step.states), -1)
    arrays = (step.q, step.k, step.v, step.gates, step.beta)
    return [a.reshape(*shape, *a.shape[1:]) for a in arrays]


def _mlx_lm(step: Step) -> Launch:
    """mlx-lm's functions, states to states: a loop over rows, or on Metal its kernel."""
    q, k, v, gates, beta = _batch(step)
    if step.layer.kind == "ssm":
        return lambda states: ssm_attn(
            v, mx.log(-step.a), k, q, step.a, beta, step.a, states, step=256
        )[1]
    update = gated_delta_kernel if mx.metal.is_available() else gated_delta_ops
    return lambda states: update(q, k, v, gates, beta, states)[1]


def _mlx(step: Step) -> Launch:
    """The fastest that MLX or mlx-lm has: mlx-lm's loop where gates are vectors."""
    if step.layer.kind != "scalar":
        return _mlx_lm(step)
    q, k, v, gates, beta = _batch(step)
    beta = beta.astype(q.dtype)
    return lambda states: mx.fast.gated_delta_update(q, k, v, gates, beta, states)[1]


def _mlx_conv(step: Step) -> Launch:
    layer = nn.Conv1d(
        step.layer.columns, step.layer.columns, 4, padding=3, groups=step.layer.columns
    )
    layer.weight, layer.bias = step.weight[:, :, None], step.bias
    return lambda x: nn.silu(layer(x)[:, : x.shape[1]])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    tiny = parser.parse_args().tiny
    host = nullcontext()
    if backend.is_cpu():
        from metal.host import installed

        host = installed(writable_inputs=["states"])
    print(backend.describe())
    with host:
        decodes(TINY if tiny else LAYERS, (1, 3) if tiny else (1, 8, 64))
        prompts(TINY if tiny else LAYERS, ([20],) if tiny else ([4096], [512] * 8))
    return 0


if __name__ == "__main__":
    run_main(main)
