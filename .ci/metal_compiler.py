"""Compile Metal texts with Apple's compiler, for several versions of Metal.

    python .ci/metal_compiler.py FOLDER --include FOLDER --std metal3.1 metal3.2 metal4.0

Prints a table, also to the job's summary on GitHub.  A version that this Xcode does not know is
skipped, and the table says so.  Exit code 1: a text does not compile, or no version is known.
"""

import argparse
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_EMPTY = "#include <metal_stdlib>\nkernel void empty() {}\n"
_SHOWN_LINES = 20  # of the errors of one text


def compile_file(path: Path, std: str, include: str) -> str | None:
    """None if the compiler takes the file, or else what it says."""
    command = ["xcrun", "-sdk", "macosx", "metal", f"-std={std}", "-I", include]
    command += ["-c", str(path), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr or f"exit code {done.returncode}"


def compile_all(files: list[Path], std: str, include: str) -> tuple[str, list[str]]:
    """(one cell of the table, the errors) for one version of Metal."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.metal"
        empty.write_text(_EMPTY)
        problem = compile_file(empty, std, include)
    if problem is not None:
        print(f"::warning title={std}::skipped: this Xcode does not compile it")
        print(problem)
        return "skipped: this Xcode does not compile it", []

    def one(path: Path) -> str | None:
        problem = compile_file(path, std, include)
        return None if problem is None else f"{std}: {path.name}\n{problem}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = [error for error in pool.map(one, files) if error is not None]
    return f"{len(files) - len(errors)} of {len(files)} texts compile", errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--include", required=True, help="the folder of MLX's headers")
    parser.add_argument("--std", nargs="+", required=True)
    args = parser.parse_args()
    files = sorted(args.folder.glob("*.metal"))
    if not files:
        print(f"{args.folder} has no .metal file")
        return 1
    cells, errors = {}, []
    for std in args.std:
        cells[std], failed = compile_all(files, std, args.include)
        errors += failed
    none_known = all(cell.startswith("skipped") for cell in cells.values())
    title = "Apple's compiler is not here" if none_known else "Apple's Metal compiler"
    lines = [f"### {title}", "", "| | |", "| --- | --- |"]
    lines += [f"| {std} | {cell} |" for std, cell in cells.items()]
    for error in errors:
        print("\n".join(error.splitlines()[:_SHOWN_LINES]))
        lines.append(f"- {error.splitlines()[0]}")
    print("\n".join(lines))
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n\n")
    return 1 if errors or none_known else 0


if __name__ == "__main__":
    raise SystemExit(main())
