"""Time launches under several values of a constant of devices.py, on this machine's GPU.

    python -m tools.bench.tune                           all constants
    python -m tools.bench.tune decode_fill few_keys      some
    python -m tools.bench.tune rows rows:8               attention of rows with drafts
    python -m tools.bench.tune rows --heads 16/8         the same with other query and KV heads

Prints one table per constant: microseconds of a call, a row per value, a column per load; a star
marks the present value.  The reader chooses the value to commit.  The heads are those of small
Qwen3 models, in bfloat16.  Check the kernels first: `vllm-metal-lite doctor`.

rows: requests whose few rows each lie behind a long context, with K and V in 16 bits, or in 8.  A
row per path, with the multiple of the time of one row: in splits (`split_prefill`), with numbers of
threadgroups that count as a full device; as decodes; as prompts.  No row starts after the deadline.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tools.lib.frame import above_zero, parser_of, print_table, run_main
from vllm_metal_lite import MetalLiteError, backend
from vllm_metal_lite.attention.paged.decodes import decode_plan
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.case import TimedStore
from vllm_metal_lite.devices import PROFILES, DeviceProfile, profile
from vllm_metal_lite.kernels import timing
from vllm_metal_lite.kernels.arguments import RMSNorm, Scores
from vllm_metal_lite.kernels.decode import paged_decode
from vllm_metal_lite.kernels.experts import Activation, Experts, ExpertWeight, expert_mlp
from vllm_metal_lite.kernels.shared_prefix import prefix_splits, shared_prefix
from vllm_metal_lite.kernels.skinny_gemm import skinny_gemm
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.kernels.weight_formats import quantised
from vllm_metal_lite.specs import AttentionShape, Quantisation

SHAPE = AttentionShape(16, 8, 128, 128, mx.bfloat16)
CHAIN = 100  # calls
_BLOCK, _OWN = 16, 128  # tokens of a block; keys of a row after a shared prefix
_FILLS = (16, 64, 128, 256, 512)
# For rows with drafts:
ROW_BITS = {"rows": None, "rows:8": 8}  # the name of each table, and the bits of its K and V
CONTEXTS = (1, 1024), (1, 8192), (1, 32_000), (4, 8192)  # requests, and the tokens of each
ROW_FILLS = (128, 256, 512, 1024)  # values of a full device

Load = Callable[..., float]  # seconds of a call, under the profile in use


def seconds_per_call(call: Callable[[mx.array], mx.array], x: mx.array) -> float:
    """Seconds of x = call(x), in chains, which keep the stream busy.

    Compiled, as decode steps are, the time excludes building the graph.
    """

    def chain(x: mx.array) -> mx.array:
        for _ in range(CHAIN):
            x = call(x)
        return x

    run = mx.compile(chain)

    def chains(count: int) -> None:
        for _ in range(count):
            mx.eval(run(x))

    return timing.seconds_alternating([chains])[0] / CHAIN


def _random(*size: int, scale: float = 1.0) -> mx.array:
    x = (mx.random.normal(size) * scale).astype(SHAPE.dtype)
    mx.eval(x)
    return x


def decode(batch: int, context: int) -> float:
    load = TimedStore(SHAPE, batch, context)
    return seconds_per_call(load.attention(), load.queries())


def prefix(rows: int, tokens: int) -> float:
    """Decodes with a shared prefix, which is read once if that saves enough."""
    load = TimedStore(SHAPE, 1, tokens + rows * _OWN)
    first, blocks = tokens // _BLOCK, mx.array(load.batch.block_tables[0, 0])
    shared = mx.broadcast_to(blocks[:first], (rows, first))
    tables = mx.concatenate([shared, blocks[first:].reshape(rows, -1)], axis=1)
    lens = mx.full((max(rows, 8),), tokens + _OWN, mx.int32)
    begin, end = mx.array([0], mx.int32), mx.full((max(rows, 8),), tokens, mx.int32)
    device = profile()
    saved = tokens * (rows - 1 - rows * device.prefix_row_cost)
    once = saved >= device.min_saved_tokens
    splits = prefix_splits(rows, SHAPE.num_heads, SHAPE.num_kv_heads, tokens)
    plan = decode_plan(rows, SHAPE.num_kv_heads, _OWN if once else tokens + _OWN)
    paged, scores = load.store, Scores(load.scale)
    store = LayerStore(paged.keys[0], paged.values[0], new_ticket(), paged.specs[0], _BLOCK)

    def call(q: mx.array) -> mx.array:
        args = tables, lens
        part = shared_prefix(q, tables, begin, end, store, scores, splits=splits)
        last, prefix = (store._replace(ticket=part.lse), part) if once else (store, None)
        return paged_decode(q, *args, last, scores, plan=plan, prefix=prefix)[0]

    return seconds_per_call(call, _random(rows, SHAPE.num_heads, SHAPE.k_head_dim))


def product(rows: int, width: int, bits: int | None = None, norm: bool = False) -> float:
    """skinny_gemm with a square weight.  norm: before it, fused if the profile fuses."""
    device = profile()
    x, w = _random(rows, width), _random(width, width, scale=width**-0.5)
    weight, gain = quantised(w, Quantisation(bits, 32)) if bits else w, mx.ones(width, w.dtype)
    few = bits is None or width * width <= device.max_normed_weights
    inside = RMSNorm(gain, 1e-5) if norm and few and rows <= device.max_normed_rows else None

    def call(x: mx.array) -> mx.array:
        normed = mx.fast.rms_norm(x, gain, 1e-5) if norm and not inside else x
        return skinny_gemm(normed, weight, norm=inside)

    return seconds_per_call(call, x)


def experts(rows: int, width: int, count: int) -> float:
    """Square weights in 4 bits, three an expert; a row has 8 experts.  Sums are left out."""
    how = Quantisation(4, 64)
    weights = [quantised(_random(count, width, width, scale=0.02), how) for _ in range(3)]
    indices = mx.arange(rows * 8, dtype=mx.uint32).reshape(rows, 8) % count
    mx.eval(weights, indices)
    gate, up, down = map(ExpertWeight, weights)
    mixture, x = Experts(gate, up, down, Activation()), _random(rows, width)
    return seconds_per_call(lambda x: expert_mlp(x, indices, mixture)[:rows], x)


# Constant: (values, load, its arguments).
CONSTANTS: dict[str, tuple[Sequence[int], Load, Sequence[tuple[Any, ...]]]] = {
    "decode_fill": (_FILLS, decode, [(1, 4096), (1, 16384), (2, 16384), (8, 4096)]),
    "few_keys": ((128, 256, 512, 1024, 2048), decode, [(4, 1 << n) for n in range(10, 14)]),
    "min_split_keys": ((64, 128, 256, 512), decode, [(1, 1024), (1, 2048), (1, 4096)]),
    "min_split_context": ((256, 512, 1024, 2048), decode, [(1, 256), (1, 512), (1, 1024)]),
    "prefix_fill": (_FILLS, prefix, [(8, 4096), (32, 4096)]),
    "min_prefix_split_keys": ((64, 128, 256, 512), prefix, [(8, 512), (8, 1024), (8, 2048)]),
    "min_saved_tokens": (
        (1, 1 << 12, 1 << 13, 1 << 14, 1 << 20),
        prefix,
        [(n, 1 << p) for n in (4, 16) for p in range(9, 13)],
    ),
    "gemm_fill": ((16, 64, 128, 256), product, [(8, 1 << n) for n in range(10, 14)]),
    "max_lane_rows": ((0, 4), product, [(1, 4096, 4), (2, 4096, 4), (4, 4096, 4)]),
    "max_lane_rows:experts": ((0, 4), experts, [(1, 2048, 128), (4, 2048, 128), (4, 2048, 8)]),
    "max_normed_rows": ((0, 64), product, [(n, 2048, None, True) for n in (8, 16, 32, 64)]),
    "max_normed_weights": ((0, 1 << 30), product, [(8, 1 << n, 4, True) for n in range(10, 14)]),
}


def sweep(name: str) -> None:
    """Print the table of a constant."""
    values, load, columns = CONSTANTS[name]
    constant, now = name.split(":")[0], profile()
    present = getattr(now, constant)
    print(f"\n### {name}: us a call of `{load.__name__}`\n")

    def timed() -> Iterator[Sequence[str]]:
        for value in sorted({*values, present}):
            changed = {backend.name(): replace(now, **{constant: value})}
            with patch.dict(PROFILES, changed):
                times = [load(*arguments) for arguments in columns]
            star = " *" if value == present else ""
            yield f"{value:,}{star}", *(f"{1e6 * seconds:,.1f}" for seconds in times)
            mx.clear_cache()

    print_table([name, *(", ".join(map(str, arguments)) for arguments in columns)], timed())


def paths(now: DeviceProfile, rows: int) -> Iterator[tuple[str, DeviceProfile, str | None]]:
    """Name, profile, and the kernel that is left out."""
    if rows == 1:
        yield "as a decode", now, None
        return
    at_once = replace(now, max_own_keys=0)
    for fill in sorted({*ROW_FILLS, now.prefix_fill}):
        star = " *" if fill == now.prefix_fill else ""
        yield f"in splits, {fill}{star}", replace(at_once, prefix_fill=fill), None
    yield "as decodes", replace(now, max_own_keys=1 << 30), "split_prefill"
    yield "as prompts", replace(now, rows_as_decodes=0), None


def seconds(
    shape: AttentionShape,
    load: tuple[int, int],
    rows: int,
    how: DeviceProfile,
    without: str | None,
) -> float:
    """Seconds of a call.  load: requests, and the tokens of each, the last `rows` of them new."""
    made = TimedStore(shape, *load, rows)
    with patch.dict(PROFILES, {backend.name(): how}):
        return seconds_per_call(made.attention("varlen", without), made.queries())


def table_of_rows(shape: AttentionShape, rows: Sequence[int], until: float) -> None:
    now, one = profile(), [0.0] * len(CONTEXTS)

    def lines() -> Iterator[Sequence[str]]:
        for count in rows:
            for name, how, without in paths(now, count):
                if time.monotonic() > until:
                    return
                times = [seconds(shape, load, count, how, without) for load in CONTEXTS]
                one[:] = times if count == 1 else one
                cells = (f"{1e6 * t:,.1f} ({t / o:.2f})" for t, o in zip(times, one, strict=True))
                yield str(count), name, *cells

    print(f"\n### {shape}\n")
    print_table(["rows", "path", *(f"{n} x {c:,}" for n, c in CONTEXTS)], lines())


def main() -> int:
    parser = parser_of("\n- ".join([f"{__doc__}\nConstants:\n", *CONSTANTS]))
    names = [*CONSTANTS, *ROW_BITS, []]
    parser.add_argument("names", nargs="*", choices=names, metavar="CONSTANT")
    parser.add_argument("--heads", default="32/8", help="query heads and KV heads, of rows")
    parser.add_argument("--deadline", type=above_zero, default=220.0, help="seconds, of rows")
    args = parser.parse_args()
    if backend.is_cpu():
        raise MetalLiteError("constants are measured on a GPU, and MLX sees none")
    print(f"## {backend.describe()}")
    heads, kv_heads = map(int, args.heads.split("/"))
    until = time.monotonic() + args.deadline
    for name in args.names or CONSTANTS:
        if name in ROW_BITS:
            bits = ROW_BITS[name]
            shape = AttentionShape(heads, kv_heads, 128, 128, mx.bfloat16, kv_bits=bits)
            table_of_rows(shape, (1, 2, 4, 8), until)
        else:
            sweep(name)
    return 0


if __name__ == "__main__":
    run_main(main)
