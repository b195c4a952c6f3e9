"""The host's compiler: its code runs on any CPU of the architecture, not only on this one."""

import subprocess

import mlx.core as mx
import pytest

from metal.host import toolchain
from tests.support.host.launch import launch

# Macros of instructions that CPUs of one architecture may lack.
OPTIONAL = (
    "__AVX__",
    "__F16C__",
    "__FMA__",
    "__AVX512F__",
    "__ARM_FEATURE_BF16",
    "__ARM_FEATURE_SVE",
)


def test_kernels_use_what_every_cpu_has():
    command = [*toolchain.compiler(), "-E", "-dM", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    defined = {line.split()[1] for line in macros.splitlines() if line.startswith("#define")}
    assert defined
    assert not defined.intersection(OPTIONAL)


def test_the_cache_tells_targets_apart(monkeypatch):
    command, key = toolchain.compiler(), toolchain._runtime_hash()
    monkeypatch.setattr(toolchain, "compiler", lambda: (*command, "-mcpu=another"))
    assert toolchain._runtime_hash.__wrapped__() != key


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_narrow_floats_need_no_instructions_of_their_own(dtype):
    """Where the CPU has none, the compiler calls functions that must be linked."""
    name = {mx.bfloat16: "__bf16", mx.float16: "half"}[dtype]
    a = mx.concatenate(
        [mx.random.normal((250,)), mx.array([0, -0.0, 1e38, mx.inf, -mx.inf, 1e-40])]
    )
    source = f"uint i = thread_position_in_grid.x; out[i] = float({name}(a[i]));"
    out = launch(source, [a], ((256,), mx.float32), (256, 1, 1), (32, 1, 1))
    assert mx.array_equal(out, a.astype(dtype).astype(mx.float32))
