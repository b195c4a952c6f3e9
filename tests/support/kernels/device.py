"""Another device than this one, for tests of engines, kernels and checks.

`pretend_gpu` is the only way to a GPU that is not there; `gpu_on_host` adds the CPU host
(metal/host), which executes the kernels.  The rest changes numbers of devices.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from metal.host import installed
from vllm_metal_lite import backend, devices
from vllm_metal_lite.checks import isolated, speed, verdicts
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.kernels.registry import Verdict

RIGHT = Verdict({}, "gather")  # no kernel failed


def pretend_gpu(patch: pytest.MonkeyPatch, verdict: Verdict | None = None) -> None:
    """A machine that seems to have a GPU.  verdict: replaces the checks."""
    patch.setattr(backend, "is_cpu", lambda: False)
    limit_memory(patch, 1 << 30)
    if verdict is not None:
        checks_find(patch, verdict)


@contextmanager
def gpu_or_host() -> Iterator[pytest.MonkeyPatch]:
    """The GPU of this machine, or else the CPU host in its place."""
    on_host = backend.is_cpu()
    with pytest.MonkeyPatch.context() as patch, installed() if on_host else nullcontext():
        if on_host:
            pretend_gpu(patch)
        yield patch


def pretend_backend(patch: pytest.MonkeyPatch, name: str) -> None:
    """MLX's backend seems to be "metal", "cuda" or "cpu"."""
    patch.setattr(backend, "name", lambda: name)


def limit_memory(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """This device seems to have this much memory."""
    patch.setattr(backend, "memory_limit", lambda: num_bytes)


def checks_find(patch: pytest.MonkeyPatch, verdict: Verdict) -> None:
    """The checks of the kernels are not run; this is their verdict."""
    patch.setattr(verdicts, "verify", lambda *_: verdict)


def fused_rows(
    patch: pytest.MonkeyPatch, rows: range | None = None, expert_rows: range | None = None
) -> None:
    """Nothing is timed: `skinny_gemm` and the kernels of experts are used for these rows.

    None: that is decided as before."""
    for name, those in (("faster_rows", rows), ("faster_expert_rows", expert_rows)):
        if those is not None:
            patch.setattr(decide, name, lambda *_, those=those: those)


@contextmanager
def gpu_on_host(patch: pytest.MonkeyPatch, cache: Path) -> Iterator[None]:
    """Its kernels run on the CPU host.  Checks run in this process, and what they find is kept in
    `cache`; nothing is timed."""
    pretend_gpu(patch)
    patch.setenv("XDG_CACHE_HOME", str(cache))
    patch.setattr(isolated, "command", lambda: None)
    patch.setattr(speed, "measure", lambda check: None)
    with installed():
        yield


def change_device(patch: pytest.MonkeyPatch, **changes) -> None:
    """Change fields of the present backend's DeviceProfile."""
    patch.setitem(devices.PROFILES, backend.name(), replace(devices.profile(), **changes))


def pad_to_powers_of_two(patch: pytest.MonkeyPatch) -> None:
    """Pad all steps as a GPU pads small steps."""
    change_device(patch, row_grains=((1 << 30, 0),))
