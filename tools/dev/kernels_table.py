"""Write the kernels of kernels/registry.py, and their number, into docs/kernels.md.

python -m tools.dev.kernels_table
"""

import re
from pathlib import Path

from tools.lib.frame import parser_of, run_main
from vllm_metal_lite.kernels.registry import REGISTRY
from vllm_metal_lite.kernels.source import FOLDER

PATH = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
HEAD = "| kernel | what it does | fallback | not used without |\n| --- | --- | --- | --- |\n"
COUNT = re.compile(r"The project has \d+ kernels")


def role(name: str) -> str:
    """The first clause of the header of metal/NAME.metal, without its brackets."""
    text = (FOLDER / f"{name}.metal").read_text(encoding="utf-8").removeprefix(f"// {name}: ")
    return re.split(r"[,;.:]\s", re.sub(r" \(.*?\)", "", text.replace("\n// ", " ")))[0]


def table() -> str:
    text = HEAD
    for row in REGISTRY.values():
        what = f"a use of `{row.base}`" if row.base else role(row.name)
        needs = ", ".join(f"`{name}`" for name in row.needs)
        text += f"| `{row.name}` | {what} | {row.fallback} | {needs} |\n"
    return text


def updated(page: str) -> str:
    """The page with the present table and number."""
    before, _, rest = page.partition(HEAD)
    after = rest.partition("\n\n")[2]
    number = sum(not row.base for row in REGISTRY.values())
    return COUNT.sub(f"The project has {number} kernels", f"{before}{table()}\n{after}")


def main() -> int:
    parser_of(__doc__).parse_args()
    PATH.write_text(updated(PATH.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_main(main)
