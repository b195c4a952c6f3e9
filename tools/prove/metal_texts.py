"""Write every Metal text that MLX generates at the shapes of real models, one file each.

    python -m tools.prove.metal_texts [FOLDER]    launches at many shapes, six serving sessions
    python -m tools.prove.metal_texts --count     how many texts each session compiles

Each file begins with MLX's own prelude.  On a Mac, Apple's compiler tells whether a file compiles:

    include=$(python -m tools.prove.metal_texts --include)
    xcrun metal -std=metal3.1 -I "$include" -c FILE -o /dev/null
"""

import hashlib
from pathlib import Path

import tests.conftest  # noqa: F401  (the CPU, before anything imports MLX)
from metal.host.mlx_source import INCLUDE, PRELUDE
from tests.support.kernels.production_shapes import all_texts
from tests.support.kernels.serving_session import MODELS, PATHS, Session, count
from tools.lib.frame import parser_of, run_main

FOLDER = Path(__file__).resolve().parents[2] / "build" / "metal_texts"


def print_counts() -> None:
    for model in MODELS:
        for name, path in PATHS.items():
            counts = count(Session(model, *path).texts())
            kernels = ", ".join(f"{n} {kernel}" for kernel, n in sorted(counts.items()))
            print(f"{model}, {name}: {counts.total()} ({kernels})")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--count", action="store_true", help="count the texts of sessions")
    parser.add_argument("--include", action="store_true", help="print the folder of MLX's headers")
    args = parser.parse_args()
    if args.include:
        print(INCLUDE)
        return 0
    if args.count:
        print_counts()
        return 0
    folder = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    sessions = (Session(m, how, 64).texts() for m in MODELS for how in ("gather", "varlen"))
    texts = list(dict.fromkeys([*all_texts(), *(text for of in sessions for text in of)]))
    for kernel, text, _ in texts:
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        (folder / f"{kernel}-{digest}.metal").write_text(PRELUDE + text, encoding="utf-8")
    print(f"{len(texts)} texts in {folder}")
    return 0


if __name__ == "__main__":
    run_main(main)
