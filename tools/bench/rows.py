"""Time attention of requests with drafts, whose few rows each lie behind a long context.

    python -m tools.bench.rows                         1, 2, 4 and 8 rows, K and V in 16 and 8 bits
    python -m tools.bench.rows --rows 4 --heads 16/8   1 and 4 rows, other query and KV heads of 128

Prints a table for each format of K and V, with a column for each load (requests x context).  A cell
has the microseconds of a call and, in brackets, their ratio to a call of one row.  The paths: in
splits (`split_prefill`), for several numbers of threadgroups that fill the device; as decodes; as
prompts.  `python -m tools.bench.tune` has the other constants of devices.py.  No line starts after
the deadline.  Check the kernels first: `vllm-metal-lite doctor`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

from tools.bench.tune import seconds_per_call
from tools.lib.frame import above_zero, at_least, parser_of, print_table, run_main
from vllm_metal_lite import MetalLiteError, backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.case import TimedStore
from vllm_metal_lite.devices import PROFILES, DeviceProfile, profile
from vllm_metal_lite.specs import AttentionShape

DIM = 128
LOADS = (1, 1024), (1, 8192), (1, 32_000), (4, 8192)  # requests, tokens of each
FILLS = (128, 256, 512, 1024)


def paths(now: DeviceProfile, rows: int) -> Iterator[tuple[str, DeviceProfile, str | None]]:
    """Yields the name of a path, its profile, and the kernel that is left out."""
    if rows == 1:
        yield "as a decode", now, None
        return
    at_once = replace(now, max_own_keys=0)
    for fill in sorted({*FILLS, now.prefix_fill}):
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


def table(shape: AttentionShape, rows: Sequence[int], until: float) -> None:
    now, one = profile(), [0.0] * len(LOADS)

    def lines() -> Iterator[Sequence[str]]:
        for count in rows:
            for name, how, without in paths(now, count):
                if time.monotonic() > until:
                    return
                times = [seconds(shape, load, count, how, without) for load in LOADS]
                one[:] = times if count == 1 else one
                cells = (f"{1e6 * t:,.1f} ({t / o:.2f})" for t, o in zip(times, one, strict=True))
                yield str(count), name, *cells

    print(f"\n### {shape}\n")
    print_table(["rows", "path", *(f"{n} x {c:,}" for n, c in LOADS)], lines())


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=at_least(2, 16), nargs="+", default=[2, 4, 8])
    parser.add_argument("--heads", default="32/8")
    parser.add_argument("--deadline", type=above_zero, default=220.0)
    args = parser.parse_args()
    if backend.is_cpu():
        raise MetalLiteError("paths are timed on a GPU, and MLX sees none")
    print(f"{backend.describe()}, MLX {backend.mlx_version()}")
    heads, kv_heads = map(int, args.heads.split("/"))
    until = time.monotonic() + args.deadline
    for bits in (None, 8):
        shape = AttentionShape(heads, kv_heads, DIM, DIM, mx.bfloat16, kv_bits=bits)
        table(shape, [1, *args.rows], until)
    return 0


if __name__ == "__main__":
    run_main(main)
