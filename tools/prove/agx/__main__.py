"""What Mesa's compiler for Apple GPUs makes of our kernels, at the shapes of real models.

    tools/prove/agx/setup.sh FOLDER                        once: Debian, root, 1.1 GB
    python -m tools.prove.agx FOLDER                       a line a text: minutes
    python -m tools.prove.agx FOLDER latent paged_decode   cases whose names hold a word
    python -m tools.prove.agx FOLDER --check               exit with 1 beyond the limits below

A text's line: instructions, 16-bit registers of a lane, bytes of scratch, the threads that fit and
those that are dispatched, stores and loads of spilled registers.  docs/verification.md says what
this shows and what not.
"""

import sys
from pathlib import Path

import tests.conftest  # noqa: F401  (the CPU, before anything imports MLX)
from metal.host.texts import KernelText
from tests.support.production_shapes import CASES, texts_of
from tools.dev.run_main import parser_of, run_main
from tools.prove.agx.chain import AgxError, Code, compile_all

# The most registers that a kernel may store in memory, by kernel; elsewhere none.
SPILLS: dict[str, int] = {}
AT_ONCE = 8


def cases(words: list[str]) -> dict[KernelText, str]:
    """Each distinct text, with the first case that launches it."""
    found: dict[KernelText, str] = {}
    for name in CASES:
        if not words or any(word in name for word in words):
            for text in texts_of(name):
                found.setdefault(text, name)
    return found


def faults(text: KernelText, code: Code) -> list[str]:
    """What goes beyond a limit."""
    limit = SPILLS.get(text.kernel.removeprefix("metal_lite_"), 0)
    found = []
    if text.threads > code.threads:
        found.append(f"{text.threads} threads are dispatched, {code.threads} fit")
    if code.spills > limit:
        found.append(f"{code.spills} spills, limit {limit}")
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    asked = cases(args.words)
    texts, wrong = list(asked), 0
    print("| case | instructions | registers | scratch | threads (dispatched) | spills : fills |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for start in range(0, len(texts), AT_ONCE):
        some = texts[start : start + AT_ONCE]
        print(f"[{start} of {len(texts)}]", file=sys.stderr, flush=True)
        try:
            codes = compile_all(args.folder, some)
        except AgxError as e:
            print(e, file=sys.stderr)
            return 2
        for text, code in zip(some, codes, strict=True):
            what = [] if not args.check else faults(text, code)
            wrong += bool(what)
            kernel = text.kernel.removeprefix("metal_lite_")
            case = asked[text] if asked[text].startswith(kernel) else f"{asked[text]}: {kernel}"
            print(
                f"| {case} | {code.instructions:,} | {code.registers} | {code.scratch} | "
                f"{code.threads} ({text.threads}) | {code.spills} : {code.fills} |"
                + "".join(f" **{one}**" for one in what),
                flush=True,
            )
    return int(wrong > 0)


if __name__ == "__main__":
    run_main(main)
