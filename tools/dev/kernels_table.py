"""Write the rows of kernels/registry.py as a table into docs/kernels.md.

python -m tools.dev.kernels_table
"""

from collections.abc import Sequence
from pathlib import Path

from vllm_metal_lite.kernels.registry import REGISTRY, KernelRow

PATH = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
HEAD = "| kernel | what replaces it | not used without | numbers in `devices.py` |"
# The numbers that a kernel's launches depend on.
NUMBERS = {
    "paged_decode": (
        *("decode_fill", "min_split_context", "min_split_keys", "few_keys"),
        *("decode_sums", "decode_sums_of_four"),
    ),
    "shared_prefix": (
        *("prefix_fill", "min_prefix_split_keys", "min_saved_tokens"),
        *("min_saved_for_prompts", "prefix_row_cost"),
    ),
    "rope_write": ("rope_many_rows",),
    "skinny_gemm": ("gemm_fill", "max_lane_rows", "max_normed_rows", "max_normed_weights"),
}


def names(values: Sequence[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def line(row: KernelRow) -> str:
    use = f" (a use of `{row.base}`)" if row.base else ""
    numbers = names(NUMBERS.get(row.name, ()))
    return f"| `{row.name}`{use} | {row.fallback} | {names(row.needs)} | {numbers} |"


def table() -> str:
    return "\n".join([HEAD, "| --- | --- | --- | --- |", *map(line, REGISTRY.values())]) + "\n"


def main() -> None:
    before, _, rest = PATH.read_text(encoding="utf-8").partition(HEAD)
    behind = rest.partition("\n\n")[2]
    PATH.write_text(f"{before}{table()}\n{behind}", encoding="utf-8")


if __name__ == "__main__":
    main()
