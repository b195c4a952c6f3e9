"""The loads of tune.py: launches around the threshold of each constant.

The forms of a load share its arrays, which are made when the first form is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from tools.bench.tuning import Load, Timer, Way
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.checks.measure import Workload
from vllm_metal_lite.devices import profile, using
from vllm_metal_lite.kernels.cache_ops import kv_gather
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.decode import DecodePlan, decode_plan, paged_decode
from vllm_metal_lite.kernels.new_rows import Columns, NewRows, Rope
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.kernels.shared_prefix import prefix_splits, shared_prefix
from vllm_metal_lite.kernels.skinny_gemm import RowNorm, gemm_plan, multiplies_in_lanes, skinny_gemm
from vllm_metal_lite.kernels.weights import Weight, quantised
from vllm_metal_lite.kv.store import PagedStore
from vllm_metal_lite.sampling.logits import argmax_in_parts, num_parts
from vllm_metal_lite.specs import AttentionShape, Quantisation, WeightShape

_BLOCK = 16
_OWN = 128  # keys of a row behind a shared prefix


@dataclass(frozen=True)
class Sizes:
    """shape: of the heads.  divisor: contexts, products and vocabularies are divided by it; above 1
    only in tests."""

    shape: AttentionShape
    divisor: int = 1

    def context(self, tokens: int) -> int:
        return max(2 * _BLOCK, tokens // self.divisor)

    def width(self, elements: int) -> int:
        return max(32, elements // self.divisor)


# Decodes


def decode(sizes: Sizes, batch: int, tokens: int) -> Load:
    """`batch` decodes at a context of `tokens`, by the plan that the profile selects."""
    context = sizes.context(tokens)
    made = cache(lambda: Workload(sizes.shape, batch, context))

    def way(plan: DecodePlan) -> Way:
        load, token = made(), new_token()
        return Way(plan, lambda q: load.attend(q, plan, token), load.queries())

    return Load(lambda: decode_plan(batch, sizes.shape.num_kv_heads, context), way)


class _Shared:
    """Decodes behind one prefix, each with keys of its own."""

    def __init__(self, sizes: Sizes, rows: int, tokens: int) -> None:
        self.rows, self.prefix, self.shape = rows, sizes.context(tokens), sizes.shape
        first, own = self.prefix // _BLOCK, _OWN // _BLOCK
        self._load = Workload(self.shape, 1, self.prefix + rows * _OWN)
        blocks = self._load.block_tables[0]
        table = mx.broadcast_to(blocks[:first], (rows, first))
        self._tables = mx.concatenate([table, blocks[first:].reshape(rows, own)], axis=1)
        most = max(rows, 8)  # as Workload
        self._seq_lens = mx.full((most,), self.prefix + _OWN, mx.int32)
        self._where = mx.array([0], mx.int32), mx.full((most,), self.prefix, mx.int32)
        self._token = new_token()
        mx.eval(self._tables, self._seq_lens, self._where, self._token)

    @property
    def splits(self) -> int:
        s = self.shape
        return prefix_splits(self.rows, s.num_heads, s.num_kv_heads, self.prefix)

    def queries(self) -> mx.array:
        q = mx.random.normal((self.rows, self.shape.num_heads, self.shape.k_head_dim))
        return q.astype(self.shape.dtype)

    def attend(self, q: mx.array, splits: int) -> mx.array:
        """splits: of the prefix; 0: each row reads the prefix for itself."""
        load, how = self._load, {"block_size": _BLOCK, "scale": self._load.scale}
        store, where, token, prefix = (load.keys, load.values), self._where, self._token, None
        length = self.prefix + _OWN
        if splits:
            prefix = shared_prefix(
                q, self._tables, self._seq_lens, *where, *store, token, splits=splits, **how
            )
            token, length = prefix.lse, _OWN
        plan = decode_plan(self.rows, self.shape.num_kv_heads, length)
        return paged_decode(
            q, self._tables, self._seq_lens, *store, token, plan=plan, prefix=prefix, **how
        )[0]


def prefix(sizes: Sizes, rows: int, tokens: int) -> Load:
    """Decodes behind a shared prefix of `tokens`, by its number of splits."""
    s, made = sizes.shape, cache(lambda: _Shared(sizes, rows, tokens))

    def way(splits: int) -> Way:
        load = made()
        return Way(splits, lambda q: load.attend(q, splits), load.queries())

    prefix = sizes.context(tokens)
    return Load(lambda: prefix_splits(rows, s.num_heads, s.num_kv_heads, prefix), way)


def sharing(sizes: Sizes, rows: int, tokens: int) -> Load:
    """Decodes behind a shared prefix of `tokens`, read once (True) or by each row."""

    made = cache(lambda: _Shared(sizes, rows, tokens))

    def form() -> bool:
        device = profile()
        saved = sizes.context(tokens) * (rows - 1 - rows * device.prefix_row_cost)
        return saved >= device.min_saved_tokens

    def way(shares: bool) -> Way:
        load = made()
        splits = load.splits if shares else 0
        return Way(shares, lambda q: load.attend(q, splits), load.queries())

    return Load(form, way)


def prefix_row_cost(sizes: Sizes, timer: Timer) -> float:
    """What a further row adds, as a fraction of what reading the prefix costs a row alone."""
    few, many = 16, 64
    loads = {rows: _Shared(sizes, rows, 4096) for rows in (few, many)}
    forms = [(few, True), (many, True), (many, False)]

    def way(rows: int, shares: bool) -> Way:
        load = loads[rows]
        splits = load.splits if shares else 0
        return Way((rows, shares), lambda q: load.attend(q, splits), load.queries())

    of_few, of_many, apart = timer([way(*form) for form in forms])
    return round(64 * (of_many - of_few) / (many - few) / (apart / many)) / 64


# Prompts


def chunk(sizes: Sizes, rows: int, prefill: str) -> Load:
    """The last rows of one context, as decodes (True) or as a prompt."""
    s, context = sizes.shape, sizes.context(1024) + rows

    def way(as_decodes: bool) -> Way:
        load = Workload(s, 1, context)
        inputs = InputBatch(1, context, _BLOCK)
        seat = inputs.add([0] * context, context)
        inputs.append_blocks(seat, np.array(load.block_tables)[0].tolist())
        batch = inputs.pack(np.array([seat]), np.array([context - rows]), np.array([rows]))
        store = PagedStore([load.spec], 1, _BLOCK)
        store.keys, store.values = [load.keys], [load.values]
        groups = {s.num_heads // s.num_kv_heads}
        limit = rows if as_decodes else 0
        attention = KernelAttention(store, prefill, groups, rows_as_decodes=limit)
        step, state = attention.prepare(batch, rows), attention.new_state()
        q = mx.random.normal((rows, s.num_heads, s.k_head_dim)).astype(s.dtype)

        def call(q: mx.array) -> mx.array:
            return attention.begin(step, state).attend(0, q, scale=load.scale)

        return Way(as_decodes, call, q, compiled=False)

    return Load(lambda: rows <= profile().rows_as_decodes, way)


def rope(sizes: Sizes, rows: int) -> Load:
    """rope_write of `rows` rows, by several heads a simdgroup (True) or one."""
    s = sizes.shape
    widths = [heads * s.k_head_dim for heads in (s.num_heads, s.num_kv_heads, s.num_kv_heads)]

    def way(many: bool) -> Way:
        q, k, v = (mx.random.normal((rows, width)).astype(s.dtype) for width in widths)
        keys, values = (mx.zeros((rows, s.num_kv_heads, s.k_head_dim), s.dtype) for _ in range(2))
        where, token = mx.arange(rows, dtype=mx.int32), new_token()
        rope = Rope(s.k_head_dim, False, 10_000.0, 1.0, None)
        mx.eval(q, k, v, keys, values, where, token)
        changed = replace(profile(), rope_many_rows=rows if many else rows + 1)

        def call(q: mx.array) -> mx.array:
            new = NewRows(
                Columns(q, 0), Columns(k, 0), Columns(v, 0), s.num_heads, rope, None, None
            )
            with using(changed):
                out, _ = rope_write(
                    new, positions=where, slot_mapping=where, keys=keys, values=values, token=token
                )
            return out.reshape(rows, -1)

        return Way(many, call, q)

    return Load(lambda: rows >= profile().rope_many_rows, way)


# Products

_FOUR_BITS = Quantisation(4, 32)


def _square(sizes: Sizes, rows: int, size: int) -> tuple[mx.array, mx.array]:
    dtype = sizes.shape.dtype
    x = mx.random.normal((rows, size)).astype(dtype)
    w = (mx.random.normal((size, size)) / size**0.5).astype(dtype)
    mx.eval(x, w)
    return x, w


def product(sizes: Sizes, outputs: int) -> Load:
    """skinny_gemm of 8 rows with a square weight, by its plan."""
    rows, size = 8, sizes.width(outputs)
    made = cache(lambda: _square(sizes, rows, size))

    def way(plan: Any) -> Way:
        x, w = made()
        return Way(plan, lambda x: skinny_gemm(x, w, plan=plan), x)

    return Load(lambda: gemm_plan(rows, WeightShape(size, size)), way)


def normed(sizes: Sizes, rows: int) -> Load:
    """A norm and a product, in one launch (True) or in two."""
    made = cache(lambda: _square(sizes, rows, sizes.width(2048)))
    return Load(lambda: rows <= profile().max_normed_rows, _with_norm(made))


def normed_weights(sizes: Sizes, outputs: int) -> Load:
    """The same of 8 rows, with a square weight in 4 bits."""
    size = sizes.width(outputs)
    made = cache(lambda: _square_of_4_bits(sizes, 8, size))
    return Load(lambda: size**2 <= profile().max_normed_weights, _with_norm(made))


def few_rows(sizes: Sizes, rows: int) -> Load:
    """skinny_gemm with a square weight in 4 bits, without matrices (True) or with them."""
    size = sizes.width(4096)
    made = cache(lambda: _square_of_4_bits(sizes, rows, size))
    shape = WeightShape(size, size, _FOUR_BITS)

    def way(in_lanes: bool) -> Way:
        x, w = made()
        plan = gemm_plan(rows, shape)._replace(in_lanes=in_lanes)
        return Way(in_lanes, lambda x: skinny_gemm(x, w, plan=plan), x)

    return Load(lambda: multiplies_in_lanes(rows, shape), way)


def _square_of_4_bits(sizes: Sizes, rows: int, size: int) -> tuple[mx.array, Weight]:
    x, w = _square(sizes, rows, size)
    packed = quantised(w, _FOUR_BITS)
    mx.eval(packed.arrays)
    return x, packed


def _with_norm(made: Callable[[], tuple[mx.array, Weight]]) -> Callable[[bool], Way]:
    def way(inside: bool) -> Way:
        x, w = made()
        gain = mx.ones(x.shape[1], x.dtype)
        mx.eval(gain)

        def call(x: mx.array) -> mx.array:
            if inside:
                return skinny_gemm(x, w, norm=RowNorm(gain, 1e-5))
            return skinny_gemm(mx.fast.rms_norm(x, gain, 1e-5), w)

        return Way(inside, call, x)

    return way


# Sampling


def argmax(sizes: Sizes, rows: int, vocab_size: int) -> Load:
    """By the number of parts a row; eager, as the sampler runs."""

    def way(parts: int) -> Way:
        x = mx.random.normal((rows, vocab_size // sizes.divisor)).astype(sizes.shape.dtype)
        mx.eval(x)

        def call(x: mx.array) -> mx.array:
            token = mx.argmax(x, -1) if parts == 1 else argmax_in_parts(x, parts)
            return mx.depends([x], [token])[0]

        return Way(parts, call, x, compiled=False)

    # Without the memory of earlier results, which belong to another profile.
    return Load(lambda: num_parts.__wrapped__(rows, vocab_size // sizes.divisor), way)


# MLX's SDPA


def _score_seconds(sizes: Sizes, timer: Timer) -> float:
    """Seconds per score: what a larger call takes more."""
    small, large = (sizes.context(n) for n in (1024, 2048))
    of_small, of_large = timer([_sdpa(sizes, n, n) for n in (small, large)])
    return max((of_large - of_small) / (large**2 - small**2), 1e-15)


def _sdpa(sizes: Sizes, rows: int, keys: int) -> Way:
    s = sizes.shape
    k, v = (mx.random.normal((1, s.num_kv_heads, keys, s.k_head_dim)) for _ in range(2))
    q = mx.random.normal((1, s.num_heads, rows, s.k_head_dim)).astype(s.dtype)
    k, v = k.astype(s.dtype), v.astype(s.dtype)
    mx.eval(q, k, v)

    def call(q: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=s.k_head_dim**-0.5)

    return Way((rows, keys), call, q, compiled=False)


def sdpa_call_cost(sizes: Sizes, timer: Timer) -> float:
    """A small call, eager because a call costs the host's time, in scores of a large one."""
    (seconds,) = timer([_sdpa(sizes, 8, 64)])
    return _power_of_two(seconds / _score_seconds(sizes, timer))


def key_cost(sizes: Sizes, timer: Timer) -> float:
    """What a further key adds to kv_gather, in scores."""
    count = sizes.context(8192)
    load = Workload(sizes.shape, 1, count)
    slots = np.random.default_rng(0).permutation(count).astype(np.int32)

    def way(keys: int) -> Way:
        def call(slots: mx.array) -> mx.array:
            k, _, _ = kv_gather(slots, load.keys, load.values, new_token())
            return mx.depends([slots], [k])[0]

        return Way(keys, call, mx.array(slots[:keys]), compiled=False)

    few, all_keys = timer([way(count // 4), way(count)])
    seconds = (all_keys - few) / (count - count // 4)
    return _power_of_two(seconds / _score_seconds(sizes, timer))


def _power_of_two(value: float) -> float:
    """Two runs differ by less than the next power."""
    return 2.0 ** round(np.log2(max(value, 1.0)))
