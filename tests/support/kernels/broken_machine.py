"""Machines on which one kernel does not work.

`python -m tests.support.kernels.broken_machine KERNEL KIND DEVICE` is checks/run_check.py on such a
machine.  DEVICE "host": the CPU host stands in for a GPU; "gpu": the GPU of this machine.
"""

import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from unittest.mock import patch

import pytest

from metal.host import installed
from tests.support.kernels.device import pretend_gpu
from vllm_metal_lite import kernels
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import isolated, run_check, speed
from vllm_metal_lite.checks.check import Speed
from vllm_metal_lite.kernels import source
from vllm_metal_lite.kernels.launch import Kernel
from vllm_metal_lite.kernels.registry import REGISTRY, name_of_launch
from vllm_metal_lite.specs import (
    AttentionShape,
    ConvShape,
    ExpertShape,
    GatedNormShape,
    KernelUse,
    Quantisation,
    RecurrenceShape,
    RopeShape,
    WeightShape,
)

# What a compiler may get wrong: text of a kernel, and its meaning.
MISCOMPILED = {
    # An update of the maximum that is forgotten, and a key that is missed.
    "paged_decode": ("m[h] = top;\n    l[h] *= fade;", "l[h] *= fade;"),
    "varlen_prefill": ("fast::exp2(", "fast::exp2(0.9f * "),
    "latent_attention": ("l[i] * fade + weight", "l[i] + weight"),
    "shared_prefix": ("m + metal::log2(l)", "m + metal::log2(0.9f * l)"),
    "merge_partitions": ("weights[p] *", "weights[0] *"),
    "kv_write": ("if (slot >= 0 && at < V_WORDS)", "if (slot > 40 && at < V_WORDS)"),
    "kv_gather": ("size_t(kv_slots[key])", "size_t(kv_slots[key / 2])"),
    "kv_write_quantised": ("if (slot >= 0 && head < KV", "if (slot > 40 && head < KV"),
    "kv_gather_quantised": ("size_t(kv_slots[key])", "size_t(kv_slots[key / 2])"),
    # A fast sine, which does not reduce large angles; a mean over all lanes, idle ones too.
    "rope_write": ("precise::sin(theta)", "precise::sin(theta + 1e-7f * theta)"),
    "latent_write": ("- second * sine", "+ second * sine"),
    # A key that no split sees.
    "fused_decode": ("split == splits - 1", "split == splits"),
    "gather_rows": ("size_t(row) * WIDTH", "size_t(row / 2) * WIDTH"),
    "add_rms_norm": ("square / float(DIM)", "square / float(SIMDGROUPS * 32)"),
    # A sum that the last simdgroup is not in.
    "skinny_gemm": ("s < SIMDGROUPS", "s < SIMDGROUPS - 1"),
    # An expert that is chosen again.
    "expert_topk": ("keys[s] = 0u;\n    }\n  }", "}\n  }"),
    # Pairs of an expert in no order; a sum without the last simdgroup, and without an expert.
    "expert_plan": ("plan[to] = part + i", "plan[to] = (part + i) ^ 1"),
    "expert_gemm": ("s < SIMDGROUPS", "s < SIMDGROUPS - 1"),
    "expert_sum": ("c < TOP_K", "c < TOP_K - 1"),
    # The first row of a segment is not carried on; a row does not see itself.
    "causal_conv": ("from + j >= begin ?", "from + j > begin ?"),
    "gated_delta": ("y + delta * both", "y"),
    # The gate of another group.
    "gated_rms_norm": ("Z_START + group * DIM", "Z_START + group / 2 * DIM"),
}
# Uses of kernels that are checked by themselves: when they are launched.
FORMS = {row.name: " || ".join(row.template) for row in REGISTRY.values() if row.template}
KINDS = ("does not compile", "is wrong", "raises", "hangs", "ends the process", "is slow")

# All that can fail by itself: latent_prefill is latent_attention for prompts, with the same text.
KERNELS = tuple(sorted(REGISTRY.keys() - {"latent_prefill"}))

# What the checks try: in float32, where every fault shows, if the kernel serves it.
ROTATIONS = RopeShape(32, eps=1e-5), RopeShape(16, traditional=True, base=None)
SHAPE = AttentionShape(4, 2, 32, 32, mx.float32)
USE = KernelUse((SHAPE,), 16, ROTATIONS, (1000,))
NARROW = (replace(SHAPE, dtype=mx.bfloat16),)
PRODUCTS = KernelUse(NARROW, 16, weights=(WeightShape(100, 96), WeightShape(96, 1056)))
MXFP4, OF_8_BITS = Quantisation(4, 32, "mxfp4"), Quantisation(8, 64)
PACKED_EXPERTS = ExpertShape(5, 64, 64, "clamped_swiglu", True, MXFP4, OF_8_BITS)
EXPERTS = KernelUse(NARROW, 16, experts=(ExpertShape(6, 96, 64), PACKED_EXPERTS))
LATENT = KernelUse(
    (AttentionShape(4, 1, 64, 16, mx.float32, latent=True),), 16, (RopeShape(16, traditional=True),)
)
RECURRENT = KernelUse(
    (),
    16,
    recurrences=(
        ConvShape(40, 4, False, True, mx.float32),
        GatedNormShape(8, 3, mx.float32),
        RecurrenceShape(1, 2, 16, 8, mx.float32),
    ),
)
QUANTISED = KernelUse((replace(SHAPE, kv_bits=8),), 16)
_USE_OF = {
    "skinny_gemm": PRODUCTS,
    **dict.fromkeys(("latent_attention", "latent_write"), LATENT),
    **dict.fromkeys(("kv_write_quantised", "kv_gather_quantised"), QUANTISED),
    **dict.fromkeys(("expert_topk", "expert_plan", "expert_gemm", "expert_sum"), EXPERTS),
    **dict.fromkeys(("causal_conv", "gated_delta", "gated_rms_norm"), RECURRENT),
}


def use_of(kernel: str) -> KernelUse:
    """A model's use that has a check of the kernel."""
    return _USE_OF.get(kernel, USE)


# 2^52 turns of a generator whose result decides something, so that no compiler can leave them out:
# one with neither an effect nor a result may go.  Unsigned: to overflow is allowed.
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
    """Those of all modules of the package."""
    names = [f"{kernels.__name__}.{found.name}" for found in pkgutil.iter_modules(kernels.__path__)]
    values = [value for name in names for value in vars(import_module(name)).values()]
    return [value for value in values if isinstance(value, Kernel)]


def cases() -> list[tuple[str, str]]:
    """Every kernel with every kind of fault that it can have."""
    return [
        (kernel, kind)
        for kernel in MISCOMPILED
        for kind in KINDS
        if kind != "is slow" or REGISTRY[kernel].timed_against
    ]


def command(kernel: str, kind: str, device: str) -> list[str]:
    """For `isolated.command`."""
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
    """What the warning of each failed kernel says, as a regular expression."""
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
    """Act whenever the kernel is launched."""
    launch = Kernel.__call__

    def call(self, arrays, template, *rest):
        if name_of_launch(self.name, template) == kernel:
            act()
        return launch(self, arrays, template, *rest)

    Kernel.__call__ = call


def install(kernel: str, kind: str) -> None:
    """Make this process such a machine, for good."""
    if kind == "does not compile":
        line = (
            f'static_assert(!({FORMS[kernel]}), "seeded");' if kernel in FORMS else "#error seeded"
        )
        source.read = edit(kernel, lambda t: t.replace(source.MARKER, f"{source.MARKER}{line}\n"))
    elif kind == "is wrong":
        source.read = edit(kernel, lambda t: t.replace(*MISCOMPILED[kernel]))
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


def miscompile(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """For a test: the kernel is wrong, also where it has been launched before."""
    monkeypatch.setattr(source, "read", edit(kernel, lambda t: t.replace(*MISCOMPILED[kernel])))
    for launcher in all_kernels():
        monkeypatch.setattr(launcher, "_launchers", {})


def _raise() -> None:
    raise RuntimeError("[metal::Device] seeded:\n the pipeline allows 512 threads")


def main() -> None:
    kernel, kind, device, _ = sys.argv[1:]
    if kind != "is slow":  # nothing else is timed here: tests are no place for it
        speed.measure = lambda check: None
    install(kernel, kind)
    if device == "gpu":
        return run_check.main()
    pretend_gpu(pytest.MonkeyPatch())
    with installed():
        run_check.main()


if __name__ == "__main__":
    main()
