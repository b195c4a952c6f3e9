"""Count the lines of each part of the repository, and fail if one exceeds its budget.

    python -m tools.dev.size

A limit is changed only in a commit that says why.  Lines are lines of files, so
do not pack two statements into one: that saves a reader nothing.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Part: (file patterns, limit), in lines.
BUDGET = {
    "vllm_metal_lite": (("vllm_metal_lite/**/*.py",), 36_560),
    "metal": (("metal/*.metal", "metal/*.h", "metal/cuda/*.*"), 4_740),
    "metal/host": (tuple(f"metal/host/**/*.{end}" for end in ("py", "h", "cpp")), 4_140),
    "tools": (("tools/**/*.py", "tools/*", "tools/dev/*.sh"), 6_120),
    "tests": (("tests/**/*.py",), 44_560),
    "docs": (("docs/*.md",), 3_280),
}


def lines(patterns: tuple[str, ...]) -> int:
    files = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sum(len(path.read_bytes().splitlines()) for path in files)


def main() -> int:
    over = []
    print(f"{'lines of':16}{'now':>8}{'limit':>8}")
    for room, (patterns, limit) in BUDGET.items():
        count = lines(patterns)
        print(f"{room:16}{count:8,}{limit:8,}")
        if count > limit:
            over.append(f"{room} has {count:,} lines, {count - limit:,} more than its limit")
    for line in over:
        print(line, file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
