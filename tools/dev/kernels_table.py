"""Write the rows of kernels/registry.py as a table into docs/kernels.md.

python -m tools.dev.kernels_table
"""

from pathlib import Path

from tools.lib.frame import parser_of, run_main
from vllm_metal_lite.kernels.registry import REGISTRY, KernelRow

PATH = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
HEAD = "| kernel | what replaces it | not used without | numbers in `devices.py` |"


def names(values: tuple[str, ...]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def line(row: KernelRow) -> str:
    use = f" (a use of `{row.base}`)" if row.base else ""
    return f"| `{row.name}`{use} | {row.fallback} | {names(row.needs)} | {names(row.constants)} |"


def table() -> str:
    return "\n".join([HEAD, "| --- | --- | --- | --- |", *map(line, REGISTRY.values())]) + "\n"


def main() -> int:
    parser_of(__doc__).parse_args()
    before, _, rest = PATH.read_text(encoding="utf-8").partition(HEAD)
    after = rest.partition("\n\n")[2]
    PATH.write_text(f"{before}{table()}\n{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_main(main)
