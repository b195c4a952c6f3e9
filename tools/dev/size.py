"""Count the lines of each part of the repository, and fail if one exceeds its budget.

    python -m tools.dev.size

A limit is changed only in a commit that says why.  Lines are lines of files, so
do not pack two statements into one: that saves a reader nothing.
"""

from pathlib import Path

from tools.lib.frame import parser_of, print_table, run_main
from vllm_metal_lite import MetalLiteError

ROOT = Path(__file__).resolve().parents[2]

# Part: (file patterns, limit), in lines.
BUDGET = {
    "vllm_metal_lite": (("vllm_metal_lite/**/*.py",), 36_202),
    "metal": (("metal/*.metal", "metal/*.h", "metal/cuda/*.*"), 4_725),
    "metal/host": (tuple(f"metal/host/**/*.{end}" for end in ("py", "h", "cpp")), 4_105),
    "tools": (("tools/*", *(f"tools/**/*.{end}" for end in ("py", "sh", "c", "h"))), 6_074),
    "tests": (("tests/**/*.py",), 44_807),
    "docs": (("docs/*.md",), 3_000),
}


def lines(patterns: tuple[str, ...]) -> int:
    files = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sum(len(path.read_bytes().splitlines()) for path in files)


def main() -> int:
    parser_of(__doc__).parse_args()
    rows = [(room, lines(patterns), limit) for room, (patterns, limit) in BUDGET.items()]
    heads = ("lines of", "now", "limit")
    print_table(heads, [(room, f"{now:,}", f"{limit:,}") for room, now, limit in rows])
    over = [f"{room} is {now - limit:,} lines over" for room, now, limit in rows if now > limit]
    if over:
        raise MetalLiteError("; ".join(over))
    return 0


if __name__ == "__main__":
    run_main(main)
