"""A machine that seems to have a GPU, and a compiler that gets one kernel wrong.

The CPU host (metal/host) stands in for the GPU.
"""

from contextlib import contextmanager
from pathlib import Path

from metal.host import installed
from vllm_metal_lite import backend
from vllm_metal_lite.checks import isolated, speed
from vllm_metal_lite.kernels import (
    add_rms_norm,
    cache_ops,
    decode,
    gather_rows,
    prefill,
    rope_write,
    shared_prefix,
    skinny_gemm,
    source,
)
from vllm_metal_lite.kernels.launch import Kernel

_MODULES = (
    add_rms_norm, cache_ops, decode, gather_rows, prefill, rope_write, shared_prefix, skinny_gemm,
)  # fmt: skip

# A compiler that forgets an update of the maximum, and one that misses a key.
MISCOMPILED = {
    "paged_decode": ("m[h] = top;\n    l[h] *= fade;", "l[h] *= fade;"),
    "varlen_prefill": ("metal::exp2(", "metal::exp2(0.9f * "),
    "shared_prefix": ("m + metal::log2(l)", "m + metal::log2(0.9f * l)"),
    "merge_partitions": ("weights[p] *", "weights[0] *"),
    "kv_write": ("if (slot >= 0 && at < V_WORDS)", "if (slot > 40 && at < V_WORDS)"),
    # A fast sine, which does not reduce large angles; a mean over all lanes, idle ones too.
    "rope_write": ("precise::sin(theta)", "precise::sin(theta + 1e-7f * theta)"),
    # A key that no split sees.
    "fused_decode": ("split == splits - 1", "split == splits"),
    "gather_rows": ("size_t(row) * WIDTH", "size_t(row / 2) * WIDTH"),
    "add_rms_norm": ("square / float(DIM)", "square / float(TURNS * THREADS * VEC)"),
    # A sum that the last simdgroup is not in.
    "skinny_gemm": ("s < SIMDGROUPS", "s < SIMDGROUPS - 1"),
}


@contextmanager
def seeming_gpu(monkeypatch, cache: Path):
    """The kernels run on the CPU host, and what is found out about them is kept in `cache`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(backend, "is_cpu", lambda: False)
    monkeypatch.setattr(backend, "memory_limit", lambda: 1 << 30)
    monkeypatch.setattr(isolated, "command", lambda: None)
    monkeypatch.setattr(speed, "measure", lambda check: None)
    with installed():
        yield


def miscompile(monkeypatch, name: str) -> None:
    original, (text, wrong) = source.read, MISCOMPILED[name]
    name = {"fused_decode": "paged_decode"}.get(name, name)

    def read(which: str) -> tuple[str, str]:
        header, body = original(which)
        if which == name:
            assert text in header + body
            header, body = header.replace(text, wrong), body.replace(text, wrong)
        return header, body

    monkeypatch.setattr(source, "read", read)
    for module in _MODULES:
        for kernel in vars(module).values():
            if isinstance(kernel, Kernel):
                monkeypatch.setattr(kernel, "_launchers", {})
