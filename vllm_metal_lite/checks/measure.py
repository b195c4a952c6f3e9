"""Times the kernels on this device, MLX's own attention, and the limits of the device.

Each call in a chain takes the previous result, so the stream stays busy.  A time is the median over
several chains, per call.  `mx.compile` compiles most chains, as it does decode steps, so that the
time excludes building the graph.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.decode import DecodePlan, decode_plan, paged_decode
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.specs import AttentionShape

_CHAIN, _REPEATS = 100, 5


def seconds_per_call(
    call: Callable[[Any], Any], x: Any, chain: int = _CHAIN, compiled: bool = True
) -> float:
    """Median seconds of x = call(x); x is an array or a tree of arrays."""

    def run(x: Any) -> Any:
        for _ in range(chain):
            x = call(x)
        return x

    run = mx.compile(run) if compiled else run
    times = []
    for _ in range(_REPEATS + 2):
        start = time.perf_counter()
        mx.eval(run(x))
        times.append((time.perf_counter() - start) / chain)
    return float(np.median(times[2:]))  # the first ones compile and capture


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Bytes read plus written per second by an elementwise operation on `size` bytes."""
    x = mx.zeros(size // 4, mx.float32)
    mx.eval(x)
    return 2 * size / seconds_per_call(lambda a: a + 1, x, chain=5, compiled=False)


def matmul_rate(dtype: mx.Dtype = mx.bfloat16, n: int = 8192) -> float:
    """Floating-point operations per second of an (n, n) x (n, n) product."""
    x, w = (mx.random.normal((n, n)).astype(dtype) / n**0.5 for _ in range(2))
    mx.eval(x, w)
    return 2 * n**3 / seconds_per_call(lambda a: a @ w, x, chain=5)


@dataclass(frozen=True)
class Timing:
    """Seconds per call, bytes of K and V that a call reads, and its floating-point operations."""

    seconds: float
    bytes: int
    flops: int

    @property
    def bandwidth(self) -> float:
        return self.bytes / self.seconds

    @property
    def rate(self) -> float:
        return self.flops / self.seconds


class Workload:
    """`batch` sequences of `context` keys in a store whose blocks are in random order.

    k_head_dim and v_head_dim of the shape must be equal, so that calls can be chained.
    """

    def __init__(
        self, shape: AttentionShape, batch: int, context: int, block_size: int = 16
    ) -> None:
        self.shape, self.batch, self.context, self.block_size = shape, batch, context, block_size
        blocks = -(-context // block_size)
        heads, dim = shape.num_kv_heads, shape.k_head_dim
        slots = (batch * blocks * block_size, heads, dim)
        self.spec = LayerSpec(heads, dim, dim, shape.dtype, bits=shape.kv_bits)
        self.keys, self.values = (
            self.spec.k_row.pack(mx.random.normal(slots).astype(shape.dtype)) for _ in range(2)
        )
        tables = np.random.default_rng(0).permutation(batch * blocks).reshape(batch, blocks)
        self.block_tables = mx.array(tables.astype(np.int32))
        # As long as serving makes it: MLX passes shorter arrays to another text of the kernel.
        self.seq_lens = mx.full((max(batch, 8),), context, mx.int32)
        self.scale = shape.k_head_dim**-0.5
        mx.eval(self.keys, self.values, self.block_tables, self.seq_lens)

    @property
    def plan(self) -> DecodePlan:
        return decode_plan(self.batch, self.shape.num_kv_heads, self.context)

    def _result(self, seconds: float, rows: int) -> Timing:
        s, size = self.shape, self.batch * self.context * self.spec.bytes_per_token
        seen = self.batch * (rows * (self.context - rows) + rows * (rows + 1) // 2)
        flops = 2 * seen * s.num_heads * (s.k_head_dim + s.v_head_dim)
        return Timing(seconds, size, flops)

    def queries(self) -> mx.array:
        """One random query per sequence."""
        s = self.shape
        q = mx.random.normal((self.batch, s.num_heads, s.k_head_dim)).astype(s.dtype)
        mx.eval(q)
        return q

    def attend(self, q: mx.array, plan: DecodePlan, token: mx.array) -> mx.array:
        """paged_decode, with the merge if the context is split."""
        return paged_decode(
            q, self.block_tables, self.seq_lens, self.keys, self.values, token,
            block_size=self.block_size, scale=self.scale, plan=plan,
            window=self.shape.window, softcap=self.shape.softcap, spec=self.spec,
        )[0]  # fmt: skip

    def decode(self, plan: DecodePlan | None = None, compiled: bool = True) -> Timing:
        """`attend`, for one query per sequence."""
        plan, token = plan or self.plan, new_token()
        mx.eval(token)
        seconds = seconds_per_call(
            lambda q: self.attend(q, plan, token), self.queries(), compiled=compiled
        )
        return self._result(seconds, 1)

    def sdpa(self, rows: int = 1, compiled: bool = True) -> Timing:
        """MLX's own attention of `rows` queries per sequence, on contiguous K and V."""
        s = self.shape
        shape = (self.batch, s.num_kv_heads, self.context, s.k_head_dim)
        k, v = (mx.random.normal(shape).astype(s.dtype) for _ in range(2))
        q = mx.random.normal((self.batch, s.num_heads, rows, s.k_head_dim)).astype(s.dtype)
        mx.eval(k, v, q)
        mask = None if rows == 1 else "causal"

        def call(q: mx.array) -> mx.array:
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)

        return self._result(seconds_per_call(call, q, compiled=compiled), rows)

    def prefill(self, how: str, rows: int, compiled: bool = False) -> Timing:
        """The last `rows` rows of each sequence as a chunk: how = "varlen" or "gather"."""
        s = self.shape
        inputs = InputBatch(self.batch, self.context, self.block_size)
        index = np.array([inputs.add([0], 1) for _ in range(self.batch)])
        inputs.num_tokens[index] = self.context
        for row, blocks in zip(index, np.array(self.block_tables).tolist(), strict=True):
            inputs.append_blocks(row, blocks)
        lengths = np.full(self.batch, rows)
        batch = inputs.pack(index, self.context - lengths, lengths)
        store = PagedStore([self.spec], 1, self.block_size)
        store.keys, store.values = [self.keys], [self.values]
        attention = KernelAttention(store, how, {s.num_heads // s.num_kv_heads})
        step, state = attention.prepare(batch, batch.num_tokens), attention.new_state()
        q = mx.random.normal((batch.num_tokens, s.num_heads, s.k_head_dim)).astype(s.dtype)
        mx.eval(q)

        def call(q: mx.array) -> mx.array:
            nonlocal state
            bound = attention.begin(step, state)
            out = bound.attend(0, q, scale=self.scale, window=s.window, softcap=s.softcap)
            state = bound.state
            return out

        return self._result(seconds_per_call(call, q, chain=5, compiled=compiled), rows)
