"""What the checks found on this device, remembered from one process to the next.

What passed is remembered for this device, MLX version and kernel source: checking costs a second
once.
"""

import hashlib
import json
from collections.abc import Sequence

from vllm_metal_lite import backend
from vllm_metal_lite.attention.select import Verdict
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import fusedcheck, measure, selfcheck
from vllm_metal_lite.checks.result import CheckResult
from vllm_metal_lite.kernels import source
from vllm_metal_lite.kernels.common import unsupported
from vllm_metal_lite.specs import AttentionShape

_PREFILLS = ("varlen", "gather")


def verify(shapes: Sequence[AttentionShape], block_size: int) -> Verdict:
    """Check the kernels at the shapes of a model, or remember that they passed."""
    failures: dict[str, str] = {}
    prefills = []
    for shape in shapes:
        failed, prefill = _own(shape, block_size)
        prefills.append(prefill)
        for result in failed:
            failures.setdefault(result.kernel, str(result))
    for shape in () if failures else shapes:
        for result in _fused(shape):
            failures.setdefault(result.kernel, str(result))
    return Verdict(failures, max(prefills, key=_PREFILLS.index))


def _own(shape: AttentionShape, block_size: int) -> tuple[list[CheckResult], str]:
    """What fails of `selfcheck.check`, and how prompts attend fastest."""
    memory = Memory()
    key = f"{shape}, blocks of {block_size}"
    if key not in memory.known:
        failed = [r for r in selfcheck.check(shape, block_size) if not r.passed]
        if failed:
            return failed, "gather"
        # Without a GPU kernels run in tests only, where time means nothing.
        if unsupported(shape, prefill=True):
            how = "gather"
        else:
            how = "varlen" if backend.is_cpu() else measure.faster_prefill(shape)
        memory.add(key, how)
    return [], memory.known[key]


def _fused(shape: AttentionShape) -> list[CheckResult]:
    """What fails of `fusedcheck.check`."""
    memory = Memory()
    key = f"{fusedcheck.heads_only(shape)}, fused"
    if key in memory.known:
        return []
    failed = [r for r in fusedcheck.check(shape) if not r.passed]
    if not failed:
        memory.add(key, "right")
    return failed


class Memory:
    """Shapes that passed with this MLX, on this device, with these kernels."""

    def __init__(self) -> None:
        texts = [source.read(kernel) for kernel in selfcheck.KERNELS]
        identity = repr([mx.__version__, backend.describe(), texts])
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.file = source.cache_folder() / f"kernels-{name}.json"
        try:
            self.known = dict(json.loads(self.file.read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError):  # none yet, or not readable: check again
            self.known = {}

    def add(self, key: str, found: str) -> None:
        self.known[key] = found
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.known, indent=1), encoding="utf-8")
        except OSError:  # a home that cannot be written to: check again next time
            return
