"""Measure constants of devices.py on this machine's GPU, and print the values to commit.

    python -m tools.bench.tune

The heads are those of Qwen3's small models, in bfloat16; a profile belongs to the device, not to a
model.  Check the kernels first: `vllm-metal-lite doctor`.
"""

import sys

from tools.bench import tune_loads as loads
from tools.bench.tuning import Choice, Constant, Formula, tune
from vllm_metal_lite import backend
from vllm_metal_lite.attention.paged.attention import PREFILLS
from vllm_metal_lite.backend import mx
from vllm_metal_lite.devices import profile
from vllm_metal_lite.specs import AttentionShape

# Decodes and their context.
_DECODES = ((1, 4096), (1, 16384), (2, 4096), (2, 16384), (8, 4096))
_FILLS = (16, 32, 64, 128, 256, 512, 1024)
SIZES = loads.Sizes(AttentionShape(16, 8, 128, 128, mx.bfloat16))


def constants(sizes: loads.Sizes = SIZES) -> list[Constant]:
    """In the order in which they are measured: an earlier one affects the loads of later ones."""
    return [
        Choice(
            "decode_fill", "1 to 8 decodes at contexts of 4,096 and 16,384, in 1 to 64 splits",
            _FILLS, lambda: (loads.decode(sizes, *load) for load in _DECODES),
        ),
        Choice(
            "few_keys", "4 decodes in splits of 256 to 2,048 keys, by 4 or 8 simdgroups",
            (128, 256, 512, 1024, 2048),
            lambda: (loads.decode(sizes, 4, c) for c in (1024, 2048, 4096, 8192)),
        ),
        Choice(
            "min_split_keys", "one decode at contexts of 1,024 to 4,096, in short or long splits",
            (64, 128, 256, 512, 1024),
            lambda: (loads.decode(sizes, 1, c) for c in (1024, 2048, 4096)),
        ),
        Choice(
            "min_split_context", "one decode at contexts of 256 to 2,048, whole or in splits",
            (256, 512, 1024, 2048, 4096),
            lambda: (loads.decode(sizes, 1, c) for c in (256, 512, 1024, 2048)),
        ),
        Choice(
            "prefix_fill", "8 and 32 decodes behind a shared prefix of 4,096, in 1 to 64 splits",
            _FILLS, lambda: (loads.prefix(sizes, n, 4096) for n in (8, 32)),
        ),
        Choice(
            "min_prefix_split_keys", "8 decodes behind a shared prefix of 512 to 2,048",
            (64, 128, 256, 512), lambda: (loads.prefix(sizes, 8, p) for p in (512, 1024, 2048)),
        ),
        Formula(
            "prefix_row_cost",
            "shared_prefix for 16 and for 64 rows, beside paged_decode of the same keys",
            lambda timer: loads.prefix_row_cost(sizes, timer),
        ),
        Choice(
            "min_saved_tokens",
            "4 and 16 decodes behind a prefix of 256 to 4,096, read once or not",
            tuple(1 << n for n in range(10, 18)),
            lambda: (loads.sharing(sizes, n, 1 << p) for n in (4, 16) for p in range(8, 13)),
        ),
        Choice(
            "rows_as_decodes", "chunks of 8 to 128 rows behind 1,024, as decodes or as prompts",
            (0, 8, 16, 32, 64, 128),
            lambda: (loads.chunk(sizes, n, p) for n in (8, 16, 32, 64, 128) for p in PREFILLS),
        ),
        Choice(
            "rope_many_rows", "rope_write of 32 to 2,048 rows, by one or four heads a simdgroup",
            (32, 64, 128, 256, 512, 1024, 2048),
            lambda: (loads.rope(sizes, n) for n in (32, 64, 128, 256, 512, 1024)),
        ),
        Choice(
            "gemm_fill", "skinny_gemm of 8 rows with weights of 1,024 to 8,192 outputs",
            (16, 32, 64, 128, 256, 512),
            lambda: (loads.product(sizes, n) for n in (1024, 2048, 4096, 8192)),
        ),
        Choice(
            "max_lane_rows", "skinny_gemm of 1 to 4 rows in 4 bits, with matrices or without",
            (0, 1, 2, 4), lambda: (loads.few_rows(sizes, n) for n in (1, 2, 4)),
        ),
        Choice(
            "max_normed_rows", "skinny_gemm of 8 to 64 rows, with the norm inside or before it",
            (0, 8, 16, 32, 64), lambda: (loads.normed(sizes, n) for n in (8, 16, 32, 64)),
        ),
        Choice(
            "max_normed_weights", "the same of 8 rows, with 1 to 64 M weights in 4 bits",
            (0, 1 << 20, 1 << 22, 1 << 24, 1 << 26),
            lambda: (loads.normed_weights(sizes, n) for n in (1024, 2048, 4096, 8192)),
        ),
        Choice(
            "argmax_long", "argmax of 8 rows of 16,384 to 262,144 logits, whole or in parts",
            tuple(1 << n for n in range(14, 20)),
            lambda: (loads.argmax(sizes, 8, 1 << n) for n in range(14, 19)),
        ),
        Choice(
            "argmax_fill", "argmax of 4 to 256 rows of 131,072 logits, whole or in parts",
            (2, 8, 16, 32, 64, 128, 256, 512),
            lambda: (loads.argmax(sizes, n, 1 << 17) for n in (4, 8, 16, 32, 64, 128, 256)),
        ),
        Formula(
            "sdpa_call_cost", "a small call of MLX's SDPA, in scores of a large one",
            lambda timer: loads.sdpa_call_cost(sizes, timer),
        ),
        Formula(
            "key_cost", "kv_gather of 8,192 keys, in scores of a large SDPA",
            lambda timer: loads.key_cost(sizes, timer),
        ),
    ]  # fmt: skip


def main() -> int:
    if backend.is_cpu():
        print("there is no GPU here to measure", file=sys.stderr)
        return 1
    print(f"constants of devices.py on {backend.describe()}, MLX {backend.mlx_version()}")
    for m in tune(constants(), profile(), lambda name: print(f"... {name}", file=sys.stderr)):
        change = f"not measured: {m.failure}" if m.failure else f"{m.before:,} -> {m.value:,}"
        print(f"{m.name + ':':24}{change}   ({m.method})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
