"""Write every Metal text that MLX generates at the shapes of real models, one file each.

    python tools/metal_texts.py [FOLDER]       launches at many shapes, and three serving sessions
    python tools/metal_texts.py --count        how many texts each session compiles

Each file begins with MLX's own prelude.  On a Mac, Apple's compiler says whether it takes one:

    xcrun metal -std=metal3.1 -I "$(python tools/metal_texts.py --include)" -c FILE -o /dev/null
"""

import argparse
import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tests.conftest  # noqa: E402, F401  (the CPU, before anything imports MLX)
from metal.host.mlx_source import include_dir, prelude  # noqa: E402
from tests.support.production_shapes import all_texts  # noqa: E402
from tests.support.serving_session import MODELS, WAYS, Session, count  # noqa: E402


def print_counts() -> None:
    for model in MODELS:
        for name, way in WAYS.items():
            counts = count(Session(model, *way).texts())
            kernels = ", ".join(f"{n} {kernel}" for kernel, n in sorted(counts.items()))
            print(f"{model}, {name}: {counts.total()} ({kernels})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "metal_texts")
    parser.add_argument("--count", action="store_true", help="count the texts of sessions")
    parser.add_argument("--include", action="store_true", help="print the folder of MLX's headers")
    args = parser.parse_args()
    if args.include:
        print(include_dir())
        return
    if args.count:
        print_counts()
        return
    folder = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    sessions = (Session(m, how, 64).texts() for m in MODELS for how in ("gather", "varlen"))
    texts = list(dict.fromkeys([*all_texts(), *(text for of in sessions for text in of)]))
    for kernel, text in texts:
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        (folder / f"{kernel}-{digest}.metal").write_text(prelude() + text, encoding="utf-8")
    print(f"{len(texts)} texts in {folder}")


if __name__ == "__main__":
    main()
