"""Break each kernel in several ways before the start, and show which kernel is replaced.

For each case the checks run in a process with the fault (broken_machine.py of
tests/support/kernels).  Then a small model generates with the remaining kernels; its tokens are
compared with the reference's.

    python -m tools.prove.break_at_start            a GPU, or else the CPU host in its place
    METAL_LITE_DEVICE=cpu python -m tools.prove.break_at_start --kernel kv_write

Exit code 1: a case did not end as it should.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from unittest.mock import patch

import vllm_metal_lite.backend  # noqa: F401  (a fast BLAS, before anybody imports MLX)
from tests.support.kernels.broken_machine import cases, command, consequence, impatient
from tests.support.kernels.device import gpu_or_host
from tests.support.kernels.table import TABLE
from tests.support.models import tiny_models as tiny
from tools.lib.frame import above_zero, parser_of, print_table, run_main
from vllm_metal_lite import backend
from vllm_metal_lite.checks import isolated, verdicts
from vllm_metal_lite.kernels.findings import Findings
from vllm_metal_lite.kernels.registry import Verdict

EQUAL = "equal"
HANGS = 15.0  # seconds until the kernel that hangs is given up


def rows(chosen: list[tuple[str, str]], device: str, end: float) -> Iterator[tuple[str, ...]]:
    """Try the cases until `end`; a row each, whose last cell is EQUAL if all is right."""
    expected, known = tokens(Verdict({}), "reference"), {}
    for kernel, kind in chosen:
        if time.monotonic() > end:
            yield kernel, kind, "not tried: the time is over", "", ""
            continue
        start = time.monotonic()
        verdict = checked(kernel, kind, device)
        seconds = time.monotonic() - start
        found = " ".join(verdict.failures.values()) or f"none, prompts by {verdict.prefill}"
        key = frozenset(verdict.failures), verdict.prefill
        if key not in known:
            known[key] = tokens(verdict, "auto") == expected
        said = EQUAL if known[key] else "DIFFER"
        said += "" if as_expected(kernel, kind, verdict) else ", UNEXPECTED failures"
        yield kernel, kind, found, f"{seconds:.1f}", said


def checked(kernel: str, kind: str, device: str) -> Verdict:
    isolated.command = lambda: command(kernel, kind, device)
    Findings().file.unlink(missing_ok=True)
    with impatient(kernel, kind, HANGS):
        return verdicts.verify(TABLE[kernel].use)


def as_expected(kernel: str, kind: str, verdict: Verdict) -> bool:
    said = consequence(kernel, kind)
    if verdict.failures.keys() != said.keys():
        return False
    # Each compiler words an error differently.
    lines = {} if kind == "does not compile" else verdict.failures
    return all(re.match(said[name], line) for name, line in lines.items())


def tokens(verdict: Verdict, attention: str) -> list[list[int]]:
    with patch.object(verdicts, "verify", lambda _: verdict):
        engine = tiny.engine("qwen3", attention=attention, num_blocks=64, max_num_batched_tokens=32)
    return tiny.answers(engine, tiny.prompts(4, 20, 40), 12)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=above_zero, default=900, help="time limit for all cases")
    parser.add_argument("--kernel", choices=sorted({kernel for kernel, _ in cases()}))
    args = parser.parse_args()
    device = "host" if backend.is_cpu() else "gpu"
    # One folder for all: MLX CUDA includes texts that lie in it.
    home = tempfile.TemporaryDirectory()
    os.environ["XDG_CACHE_HOME"] = home.name
    print(f"{backend.describe()}\n")
    chosen = [case for case in cases() if args.kernel in (None, case[0])]
    with gpu_or_host():
        heads = ("kernel", "fault", "failures", "s", "tokens")
        found = print_table(heads, rows(chosen, device, time.monotonic() + args.seconds))
    wrong = [row for row in found if row[-1] != EQUAL]
    print(f"\n{len(wrong)} cases ended otherwise than they should")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
