"""What a reader of this repository must hold, by part; fails if a part is over its budget.

    python -m tools.dev.size

Code lines are lines of Python without blank lines, comments, docstrings and imports, so packing two
statements into one line gains little, and an explanation costs nothing.  A budget has 3 % of slack.
A commit that raises one says what it bought.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

from tools.lib.frame import parser_of, print_table, run_main
from vllm_metal_lite import MetalLiteError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_metal_lite"
SLACK = 1.03

# Of the package.
BUDGET = {"code lines": 26_060, "files": 343, "classes": 451, "page lines": 3_165}
# Parts that are counted in lines: (file patterns, budget).
LINES = {
    "metal": (("metal/*.metal", "metal/*.h", "metal/cuda/*.*"), 4_730),
    "metal/host": (tuple(f"metal/host/**/*.{end}" for end in ("py", "h", "cpp")), 4_120),
    "tools": (("tools/*", *(f"tools/**/*.{end}" for end in ("py", "sh", "c", "h"))), 7_000),
    "tests": (("tests/**/*.py",), 57_000),
    "docs": (("docs/*.md",), 3_600),
}
_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


def weigh(text: str) -> Counter[str]:
    """The code lines and the classes of a Python file."""
    tree, no_code = ast.parse(text), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is None:
                continue
            node = node.body[0]
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        no_code.update(range(node.lineno, node.end_lineno + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    classes = sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
    return Counter({"code lines": len(lines - no_code), "files": 1, "classes": classes})


def rooms() -> dict[str, Counter[str]]:
    """What each folder of the package weighs, and the files beside the folders."""
    found: dict[str, Counter[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).parts
        room = parts[0] if len(parts) > 1 else "(top)"
        found.setdefault(room, Counter()).update(weigh(file.read_text(encoding="utf-8")))
    page = [
        f
        for f in PACKAGE.glob("server/page/**/*")
        if f.suffix in (".js", ".css", ".html") and "vendor" not in f.parts
    ]
    found["server"]["page lines"] = sum(map(num_lines, page))
    return found


def num_lines(file: Path) -> int:
    return len(file.read_bytes().splitlines())


def main() -> int:
    parser_of(__doc__).parse_args()
    found = rooms()
    total = sum(found.values(), Counter())
    rows = [(room, *(f"{weight[kind]:,}" for kind in BUDGET)) for room, weight in found.items()]
    rows += [("all", *(f"{total[kind]:,}" for kind in BUDGET))]
    rows += [("budget", *(f"{most:,}" for most in BUDGET.values()))]
    print_table(("room", *BUDGET), rows)
    print()
    lines = {}
    for part, (patterns, _) in LINES.items():
        files = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
        lines[part] = sum(map(num_lines, files))
    budgets = {part: most for part, (_, most) in LINES.items()}
    print_table(
        ("lines of", "now", "budget"), [(p, f"{n:,}", f"{budgets[p]:,}") for p, n in lines.items()]
    )
    over = [
        f"{name} are {now:,}, and the budget is {most:,}"
        for name, now, most in (
            *((kind, total[kind], most) for kind, most in BUDGET.items()),
            *((f"lines of {part}", now, budgets[part]) for part, now in lines.items()),
        )
        if now > most * SLACK
    ]
    if over:
        raise MetalLiteError("; ".join(over))
    return 0


if __name__ == "__main__":
    run_main(main)
