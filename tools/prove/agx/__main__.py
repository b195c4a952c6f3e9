"""The code that Mesa's compiler for Apple GPUs makes of our kernels, at the shapes of real models.

    tools/prove/agx/setup.sh FOLDER                        once: Debian, root, 1.1 GB
    python -m tools.prove.agx FOLDER                       a line a text: ten minutes
    python -m tools.prove.agx FOLDER paged_decode MLX      cases whose names hold a word; MLX's own
    python -m tools.prove.agx FOLDER --check               exit with 1 beyond limits.py

A text's line: instructions, 16-bit registers of a lane, bytes of scratch, the threads that fit and
those that are dispatched, stores and loads of spilled registers.  docs/verification.md says what
this shows and what not.
"""

from collections.abc import Iterator
from pathlib import Path

import tests.conftest  # noqa: F401  (the CPU, before anything imports MLX)
from metal.host.texts import KernelText
from tools.lib.frame import parser_of, print_table, run_main, say
from tools.prove.agx import mlx_kernels
from tools.prove.agx.chain import AgxError, Code, compile_all
from tools.prove.agx.limits import faults
from tools.prove.agx.shapes import named_texts
from vllm_metal_lite import MetalLiteError

HEADS = ("case", "instructions", "registers", "scratch", "threads (dispatched)", "spills : fills")
HEADS += ("faults",)
AT_ONCE = 8
# A text that must be found: it spills, or does not fit.
_CONTROL = """[[kernel]] void control(
    const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]]) {
  thread float held[HELD];
  #pragma unroll
  for (int i = 0; i < HELD; i++) held[i] = x[i * 32 + thread_position_in_grid.x];
  for (int turn = 0; turn < int(x[0]); turn++) {
    #pragma unroll
    for (int i = 0; i < HELD; i++) held[i] = held[i] * x[turn] + held[(i + 1) % HELD];
  }
  #pragma unroll
  for (int i = 0; i < HELD; i++) y[i * 32 + thread_position_in_grid.x] = held[i];
}
"""
CONTROLS = {
    KernelText("control", _CONTROL.replace("HELD", str(held)), threads): f"control of {held} floats"
    for held, threads in ((160, 32), (80, 1024))
}


def cases(words: list[str]) -> dict[KernelText, str]:
    """Each distinct text, with its first name."""
    found: dict[KernelText, str] = {}
    for name, text in (named_texts(words) | mlx_kernels.texts()).items():
        if not words or any(word in name for word in words):
            found.setdefault(text, name)
    return found


def compiled(folder: Path, texts: list[KernelText]) -> Iterator[tuple[KernelText, Code]]:
    for start in range(0, len(texts), AT_ONCE):
        say(f"{start} of {len(texts)}")
        some = texts[start : start + AT_ONCE]
        yield from zip(some, compile_all(folder, some), strict=True)


def rows(folder: Path, asked: dict[KernelText, str], strictly: bool) -> Iterator[tuple[str, ...]]:
    """A row for each text; the last cell names the limits that the text exceeds."""
    for text, code in compiled(folder, [*(CONTROLS if strictly else ()), *asked]):
        name = CONTROLS.get(text) or asked[text]
        what = faults(name, text.threads, code.threads, code.spills) if strictly else []
        if text in CONTROLS:
            if not what:
                raise AgxError(f"{name} keeps the limits: the limits are blind")
            continue
        sizes = f"{code.instructions:,}", f"{code.registers}", f"{code.scratch}"
        fits = f"{code.threads} ({text.threads})"
        yield name, *sizes, fits, f"{code.spills} : {code.fills}", "; ".join(what)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("words", nargs="*", default=[])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    chosen = cases(args.words)
    if not chosen:
        raise MetalLiteError(f"no text's name contains {' or '.join(map(repr, args.words))}")
    found = print_table(HEADS, rows(args.folder, chosen, args.check))
    return 1 if any(row[-1] for row in found) else 0


if __name__ == "__main__":
    run_main(main)
