"""Times a kernel beside its next best way, at the shape of a check.

Both ways run as serving runs them: `KernelAttention` with the kernel and without it, or the MLX
operations that a fused kernel replaces.  The loads are large enough that the device's work, not the
host's, is timed.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.fusedcheck import new_latents, new_rows
from vllm_metal_lite.checks.result import Speed
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.cache_ops import kv_write
from vllm_metal_lite.kernels.common import new_token
from vllm_metal_lite.kernels.decode import decode_plan, paged_decode
from vllm_metal_lite.kernels.gated_rms_norm import gated_rms_norm
from vllm_metal_lite.kernels.gather_rows import gather_rows
from vllm_metal_lite.kernels.latent_write import latent_write
from vllm_metal_lite.kernels.new_rows import Columns, HeadNorm, Rope
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.kv.store import LayerSpec, PagedStore
from vllm_metal_lite.specs import GatedNormShape

# Medians of _REPEATS times _CALLS calls.
_REPEATS, _CALLS = 5, 4
# Decodes and their context; a long context, in splits; a prefix that the decodes share.
_DECODES, _CONTEXT, _LONG, _PREFIX = 16, 512, 4096, 2048
# Prompts: (sequences, context, rows of each): four whole ones, and a chunk.
_PROMPTS = ((4, 512, 512), (1, 4096, 1024))
# Rows of launches without attention.
_ROWS = 512

Way = Callable[[], object]


def measure(check: Check) -> Speed | None:
    """None if the kernel has no alternative to compare with."""
    ways = _WAYS.get(check.kernel)
    again = check.prefix or (check.rotation is not None and check.kernel in _OF_ATTENTION)
    if ways is None or again:
        return None
    loads = ways(check)
    found = _speed(loads)
    # Slow must be found twice: something else may have used the device.
    return min(found, _speed(loads), key=lambda speed: speed.ratio) if found.is_slow else found


def _speed(loads: list[tuple[Way, Way]]) -> Speed:
    ours, alternative = np.sum([_seconds(*load) for load in loads], axis=0)
    return Speed(float(ours), float(alternative))


def _seconds(ours: Way, alternative: Way) -> tuple[float, float]:
    """Seconds per call, in turns because clocks drift."""
    times = []
    for repeat in range(_REPEATS + 1):
        pair = []
        for way in (ours, alternative):
            start = time.perf_counter()
            mx.eval([way() for _ in range(_CALLS)])
            pair.append((time.perf_counter() - start) / _CALLS)
        if repeat:  # the first one compiles
            times.append(pair)
    first, second = np.median(times, axis=0)
    return float(first), float(second)


class _Load:
    """Sequences of one context in a store of one layer; the last rows of each are computed."""

    def __init__(
        self, check: Check, sequences: int, context: int, rows: int, prefix: int = 0
    ) -> None:
        s, size = check.shape, check.block_size
        self.shape, blocks, shared = s, -(-context // size), prefix // size
        inputs = InputBatch(sequences, context, size)
        index = np.array([inputs.add([0] * context, context) for _ in range(sequences)])
        num_blocks = shared + sequences * (blocks - shared)
        free = np.random.default_rng(0).permutation(num_blocks).tolist()
        of_prefix = [free.pop() for _ in range(shared)]
        for row in index:
            inputs.append_blocks(row, of_prefix + [free.pop() for _ in range(blocks - shared)])
        counts = np.full(sequences, rows)
        self.batch = inputs.pack(index, context - counts, counts)
        spec = LayerSpec(
            s.num_kv_heads, s.k_head_dim, s.v_head_dim, s.dtype, s.window, bits=s.kv_bits
        )
        self.store = PagedStore([spec], num_blocks, size)
        slots = len(self.store.keys[0])
        for arrays, row in ((self.store.keys, spec.k_row), (self.store.values, spec.v_row)):
            drawn = mx.random.normal((slots, s.num_kv_heads, row.dim))
            arrays[0] = row.pack(drawn.astype(s.dtype))
        self.q = mx.random.normal((self.batch.num_tokens, s.num_heads, s.k_head_dim))
        self.q = self.q.astype(s.dtype)
        # Rotary parts of queries to latents.
        self.q_pe = self.q[..., : s.v_head_dim] + 0 if s.latent else None
        mx.eval(self.q, [] if self.q_pe is None else self.q_pe, self.store.arrays)

    def way(self, prefill: str, *without: str) -> Way:
        """Attention with the kernels that are not in `without`."""
        s = self.shape
        groups = {s.num_heads // s.num_kv_heads}
        attention = KernelAttention(self.store, prefill, groups, without=without)
        step, state = attention.prepare(self.batch, self.batch.num_tokens), attention.new_state()
        sinks = mx.zeros(s.num_heads) if s.sinks else None
        return lambda: attention.begin(step, state).attend(
            0, self.q, scale=s.k_head_dim**-0.5, window=s.window, softcap=s.softcap, sinks=sinks,
            q_pe=self.q_pe,
        )  # fmt: skip


def _decode(check: Check, sequences: int, context: int, prefix: int = 0) -> list[tuple[Way, Way]]:
    load = _Load(check, sequences, context, 1, prefix)
    return [(load.way("gather"), load.way("gather", check.kernel))]


def _prompts(check: Check) -> list[tuple[Way, Way]]:
    loads = [_Load(check, *sizes) for sizes in _PROMPTS]
    return [(load.way("varlen"), load.way("gather")) for load in loads]


def _gathered(check: Check) -> list[tuple[Way, Way]]:
    shape = check.shape
    q = mx.random.normal((_ROWS, shape.num_heads, shape.k_head_dim)).astype(shape.dtype)
    index = mx.array(np.random.default_rng(0).permutation(_ROWS).astype(np.int32))
    mx.eval(q, index)
    return [(lambda: gather_rows(q, index), lambda: q[index])]


def _normed_sum(check: Check) -> list[tuple[Way, Way]]:
    x = mx.random.normal((_ROWS, *check.sizes)).astype(check.shape.dtype)
    weight = mx.ones(check.sizes, check.shape.dtype)
    mx.eval(x, weight)

    def apart() -> object:
        added = x + x
        return added, mx.fast.rms_norm(added, weight, 1e-5)

    return [(lambda: add_rms_norm(x, x, weight, 1e-5), apart)]


def _gated_norm(check: Check) -> list[tuple[Way, Way]]:
    """As the layers of mlx-lm that normalise first; those that do not have as many launches."""
    shape = check.recurrence
    assert isinstance(shape, GatedNormShape)
    x = mx.random.normal((_ROWS, shape.groups, shape.dim)).astype(shape.dtype)
    weight, z = mx.ones(shape.dim, shape.dtype), Columns(x.reshape(_ROWS, -1), 0)
    mx.eval(x, weight, z.array)

    def apart() -> mx.array:
        return mx.fast.rms_norm(x, weight, 1e-5) * (x * mx.sigmoid(x))

    together = partial(gated_rms_norm, x, z, weight, 1e-5, dim=shape.dim)
    return [(together, mx.compile(apart))]


def _turned(x: mx.array, rope: Rope, where: mx.array) -> mx.array:
    """The heads x rotated to the positions `where`, by MLX."""
    if rope.factor != 1:
        x = x.at[..., : rope.dims].multiply(rope.factor)
    return mx.fast.rope(
        x, rope.dims, traditional=rope.traditional, base=rope.base, scale=rope.scale, offset=where,
        freqs=rope.freqs,
    )  # fmt: skip


def _written(check: Check) -> list[tuple[Way, Way]]:
    """One launch for the new rows of prompts, and norm, rotation and kv_write apart."""
    assert check.rotation is not None
    shape, positions = check.shape, np.arange(_ROWS)
    new, _ = new_rows(shape, positions, check.rotation)
    spec = LayerSpec(
        shape.num_kv_heads, shape.k_head_dim, shape.v_head_dim, shape.dtype, bits=shape.kv_bits
    )
    store = PagedStore([spec], -(-_ROWS // 16), 16)
    keys, values = store.keys[0], store.values[0]
    where = mx.array(positions.astype(np.int32))
    rope, token, joined = new.rope, new_token(), new.q.array
    assert rope is not None
    columns = (new.k.start, new.v.start)
    mx.eval(new.arrays, where, token)

    def turned(x: mx.array, norm: HeadNorm | None) -> mx.array:
        if norm is not None:
            x = mx.fast.rms_norm(x, norm.weight, norm.eps)
        return _turned(x, rope, where)

    def apart() -> object:
        q, k, v = (
            part.reshape(_ROWS, -1, 1, dim)
            for part, dim in zip(
                mx.split(joined, columns, axis=1),
                (shape.k_head_dim, shape.k_head_dim, shape.v_head_dim),
                strict=True,
            )
        )
        q, k = turned(q, new.q_norm), turned(k, new.k_norm)
        return q, kv_write(k.squeeze(2), v.squeeze(2), where, keys, values, token, spec)

    together = partial(
        rope_write, new, positions=where, slot_mapping=where, keys=keys, values=values,
        token=token, spec=spec,
    )  # fmt: skip
    return [(together, apart)]


def _latents_written(check: Check) -> list[tuple[Way, Way]]:
    """One launch for the new rows of a latent layer, and norm, rotations and kv_write apart."""
    assert check.rotation is not None
    shape, positions = check.shape, np.arange(_ROWS)
    rank, heads = shape.k_head_dim, shape.num_heads
    new, _ = new_latents(shape, positions, check.rotation)
    spec = LayerSpec(1, rank, shape.v_head_dim, shape.dtype, bits=shape.kv_bits)
    store = PagedStore([spec], -(-_ROWS // 16), 16)
    keys, values, token = store.keys[0], store.values[0], new_token()
    where, rope = mx.array(positions.astype(np.int32)), new.rope
    mx.eval(new.q.array, new.latent.array, new.norm.weight, where, token)

    def apart() -> object:
        q = new.q.array.reshape(_ROWS, heads, 1, -1)[..., -shape.v_head_dim :]
        latents, k_pe = mx.split(new.latent.array, [rank], axis=1)
        latents = mx.fast.rms_norm(latents, new.norm.weight, new.norm.eps)[:, None]
        rotary = _turned(k_pe[:, None, None], rope, where).squeeze(2)
        return _turned(q, rope, where), kv_write(latents, rotary, where, keys, values, token, spec)

    together = partial(
        latent_write, new, positions=where, slot_mapping=where, keys=keys, values=values,
        token=token, spec=spec,
    )  # fmt: skip
    return [(together, apart)]


def _fused(check: Check) -> list[tuple[Way, Way]]:
    """One launch for decodes, and `rope_write` before `paged_decode`."""
    assert check.rotation is not None
    load, shape = _Load(check, _DECODES, _CONTEXT, 1), check.shape
    new, _ = new_rows(shape, load.batch.positions, check.rotation)
    positions, slots, tables, seq_lens = (
        mx.array(rows)
        for rows in (
            load.batch.positions, load.batch.slot_mapping, load.batch.block_tables,
            load.batch.seq_lens,
        )
    )  # fmt: skip
    keys, values, token = load.store.keys[0], load.store.values[0], new_token()
    plan, spec = decode_plan(_DECODES, shape.num_kv_heads, _CONTEXT), load.store.specs[0]
    attend = partial(
        paged_decode, block_size=check.block_size, scale=shape.k_head_dim**-0.5, plan=plan,
        window=shape.window, softcap=shape.softcap,
        sinks=mx.zeros(shape.num_heads) if shape.sinks else None, spec=spec,
    )  # fmt: skip
    mx.eval(new.arrays, positions, slots, tables, seq_lens, token)

    def apart() -> object:
        q, written = rope_write(
            new, positions=positions, slot_mapping=slots, keys=keys, values=values, token=token,
            spec=spec,
        )  # fmt: skip
        return attend(q, tables, seq_lens, keys, values, written)

    return [(lambda: attend(new, tables, seq_lens, keys, values, token), apart)]


_WAYS: dict[str, Callable[[Check], list[tuple[Way, Way]]]] = {
    "paged_decode": lambda check: _decode(check, _DECODES, _CONTEXT),
    "merge_partitions": lambda check: _decode(check, 1, _LONG),
    "shared_prefix": lambda check: _decode(check, _DECODES, _PREFIX + 128, _PREFIX),
    "varlen_prefill": _prompts,
    "latent_attention": lambda check: _decode(check, _DECODES, _CONTEXT),
    "latent_prefill": _prompts,
    "gather_rows": _gathered,
    "rope_write": _written,
    "latent_write": _latents_written,
    "fused_decode": _fused,
    "add_rms_norm": _normed_sum,
    "gated_rms_norm": _gated_norm,
}
# With a rotation or a prefix these are checked again, but timed once.
_OF_ATTENTION = ("merge_partitions", "shared_prefix")
