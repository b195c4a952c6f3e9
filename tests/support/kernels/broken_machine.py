"""Machines on which one kernel does not work.

`python -m tests.support.kernels.broken_machine KERNEL KIND DEVICE` is checks/run_check.py on such a
machine.  DEVICE "host": the CPU host stands in for a GPU; "gpu": the GPU of this machine.
"""

import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from unittest.mock import patch

import pytest

from metal.host import installed
from tests.support.kernels.device import pretend_gpu
from tests.support.kernels.table import TABLE
from vllm_metal_lite import kernels
from vllm_metal_lite.checks import isolated, run_check, speed
from vllm_metal_lite.checks.check import Speed
from vllm_metal_lite.kernels import source
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.kernels.registry import REGISTRY, name_of_launch

# A use that is checked by itself -> the condition on template values under which it is launched.
FORMS = {row.name: " || ".join(row.template) for row in REGISTRY.values() if row.template}
KINDS = ("does not compile", "is wrong", "raises", "hangs", "ends the process", "is slow")

# 2^52 turns of a generator.  Its result decides a return, so no compiler can leave the loop out.
# Numbers are unsigned, because these may overflow.
_HANG = """uint seeded = uint(thread_position_in_threadgroup.x);
for (uint i = 0u; i < (%s ? 1u << 20 : 0u); ++i) {
  for (uint j = 0u; j != 0xffffffffu; ++j) {
    seeded = seeded * 1664525u + 1013904223u;
  }
}
if (seeded == 12345u) {
  return;
}
"""


def all_kernels() -> list[Kernel]:
    """The kernels of all modules of kernels/."""
    names = [f"{kernels.__name__}.{found.name}" for found in pkgutil.iter_modules(kernels.__path__)]
    values = [value for name in names for value in vars(import_module(name)).values()]
    return [value for value in values if isinstance(value, Kernel)]


def cases() -> list[tuple[str, str]]:
    """Every kernel with every kind of fault that it can have."""
    return [
        (kernel, kind)
        for kernel in TABLE
        for kind in KINDS
        if kind != "is slow" or REGISTRY[kernel].timed
    ]


def command(kernel: str, kind: str, device: str) -> list[str]:
    """The program that serves checks, in place of `isolated.command`."""
    return [sys.executable, "-m", "tests.support.kernels.broken_machine", kernel, kind, device]


@contextmanager
def impatient(kernel: str, kind: str, seconds: float) -> Iterator[None]:
    """Wait this number of seconds for a kernel that hangs.  Nothing else depends on the speed of
    the machine: any other check may take ten minutes."""
    ask = isolated.Child.ask

    def ask_for(child, check, timed):
        hanging = kind == "hangs" and check.kernel == kernel
        with patch.object(isolated, "DEADLINE", seconds if hanging else 600.0):
            return ask(child, check, timed)

    with patch.object(isolated.Child, "ask", ask_for):
        yield


def consequence(kernel: str, kind: str) -> dict[str, str]:
    """Failed kernel -> a regular expression of its warning."""
    said = {
        "does not compile": "seeded",
        "is wrong": "(error .* allowed|its results are NaN)",
        "raises": "the pipeline allows 512 threads",
        "hangs": "hangs: no result after",
        "ends the process": "ends the process: SIGABRT",
        "is slow": "takes 300 us where its fallback takes 100 us",
    }
    faster = kind == "is slow" and kernel == "varlen_prefill"  # a choice, not a failure
    return {} if faster else {kernel: rf"{kernel} \(.*\): .*{said[kind]}"}


def edit(kernel: str, change: Callable[[str], str]) -> Callable[[str], tuple[str, str]]:
    """A `source.read` that changes one kernel's body, or a header that it includes."""
    original = source.read

    def read(name: str) -> tuple[str, str]:
        header, body = original(name)
        if name != REGISTRY[kernel].file:
            return header, body
        changed = change(header + source.MARKER + body)
        assert changed != header + source.MARKER + body
        return tuple(changed.split(source.MARKER))

    return read


def at_launch(kernel: str, act: Callable[[], None]) -> None:
    """Call `act` before each launch of the kernel."""
    launch = Kernel.__call__

    def call(self, arrays, template, *rest):
        if name_of_launch(self.name, template) == kernel:
            act()
        return launch(self, arrays, template, *rest)

    Kernel.__call__ = call


def install(kernel: str, kind: str) -> None:
    """Make this process such a machine until it ends."""
    if kind == "does not compile":
        line = (
            f'static_assert(!({FORMS[kernel]}), "seeded");' if kernel in FORMS else "#error seeded"
        )
        source.read = edit(kernel, lambda t: t.replace(source.MARKER, f"{source.MARKER}{line}\n"))
    elif kind == "is wrong":
        source.read = edit(kernel, lambda t: t.replace(*TABLE[kernel].miscompiled))
    elif kind == "hangs":
        loop = _HANG % FORMS.get(kernel, "true")
        source.read = edit(kernel, lambda t: t.replace(source.MARKER, f"{source.MARKER}{loop}"))
    elif kind == "raises":
        at_launch(kernel, _raise)
    elif kind == "ends the process":
        at_launch(kernel, os.abort)
    else:
        slow = Speed(3e-4, 1e-4)
        speed.measure = lambda check: slow if check.kernel == kernel else None


def miscompile(
    monkeypatch: pytest.MonkeyPatch, kernel: str, fault: tuple[str, str] | None = None
) -> None:
    """For a test: the kernel is wrong, also where it has been launched before.  fault: a text and
    the wrong text in its place; by default that of the table."""
    text, wrong = fault or TABLE[kernel].miscompiled
    monkeypatch.setattr(source, "read", edit(kernel, lambda t: t.replace(text, wrong)))
    for launcher in all_kernels():
        monkeypatch.setattr(launcher, "_launchers", {})


def _raise() -> None:
    raise RuntimeError("[metal::Device] seeded:\n the pipeline allows 512 threads")


def main() -> None:
    kernel, kind, device, _ = sys.argv[1:]
    if kind != "is slow":  # times mean nothing in tests
        speed.measure = lambda check: None
    install(kernel, kind)
    if device == "gpu":
        return run_check.main()
    pretend_gpu(pytest.MonkeyPatch())
    with installed():
        run_check.main()


if __name__ == "__main__":
    main()
