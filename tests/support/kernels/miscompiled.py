"""A machine that seems to have a GPU, and a compiler that gets one kernel wrong.

The CPU host (metal/host) stands in for the GPU.
"""

from contextlib import contextmanager
from pathlib import Path

from metal.host import installed
from tests.support.kernels.broken_machine import MISCOMPILED, all_kernels, edit
from tests.support.kernels.device import pretend_gpu
from vllm_metal_lite.checks import isolated, speed
from vllm_metal_lite.kernels import source


@contextmanager
def seeming_gpu(monkeypatch, cache: Path):
    """The kernels run on the CPU host, and what is found out about them is kept in `cache`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(isolated, "command", lambda: None)
    monkeypatch.setattr(speed, "measure", lambda check: None)
    with installed():
        yield


def miscompile(monkeypatch, name: str) -> None:
    text, wrong = MISCOMPILED[name]
    monkeypatch.setattr(source, "read", edit(name, lambda whole: whole.replace(text, wrong)))
    for kernel in all_kernels():
        monkeypatch.setattr(kernel, "_launchers", {})
