"""Which variables of a thread a compiler leaves in memory instead of registers.

On a GPU an array of a thread lives in registers only if every index is a constant once loops are
unrolled; otherwise it lies in memory, for the whole kernel.  Compilers differ in which loops they
unroll on their own, so clang unrolls none here but those that a pragma names.
"""

import re

from .faults import HostError
from .strict import compile_metal

# spir64 has no cost model: that of a GPU would decide about loops in its own way.
_OPTIONS = (
    *("-triple", "spir64", "-O2", "-fno-unroll-loops", "-emit-llvm", "-o", "-"),
    *("-include", "metal_bodies", "-DMETAL_COPY="),
)
_ALLOCA = re.compile(r"^ +%(\S+) = alloca (.+?), align", re.M)


def left_in_memory(source: str) -> list[str]:
    """The variables of a thread in memory after optimisation, as "name: LLVM's type".

    source: a text as `mx.fast.metal_kernel` generates it.  Raises HostError if it does not compile
    (it needs clang 22: bfloat on spir64).
    """
    done = compile_metal(source, _OPTIONS)
    if done.returncode or "define " not in done.stdout:
        raise HostError(f"clang does not compile the text:\n{done.stderr[:2000]}")
    return [f"{name}: {kind}" for name, kind in _ALLOCA.findall(done.stdout)]
