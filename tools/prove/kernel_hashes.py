"""Print a hash of each kernel's results on this device, to compare two versions of the kernels.

    METAL_LITE_DEVICE=gpu python -m tools.prove.kernel_hashes > new.txt

Run it in the folder of a checkout; the same file also works in an older checkout.  Without a
GPU the kernels run on the CPU host.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import tests.conftest  # noqa: F401  (the CPU, unless METAL_LITE_DEVICE says otherwise)
from metal.host import installed
from tests.support import kernel_cases, kernel_runs
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The launch of every kernel in kernel_runs, then decodes at more shapes."""
    for name, run in kernel_runs.RUN.items():
        for dtype in DTYPES:
            yield f"{name} {dtype}", partial(run, dtype)
    for dtype in DTYPES:
        for heads, dim in (((4, 4), 64), ((14, 2), 64), ((8, 2), 128), ((4, 2), 256), ((8, 1), 80)):
            for plan in ((1, 8), (4, 4)):
                for more in ({}, {"window": 20, "softcap": 5.0, "sinks": True}, {"bits": 4}):
                    how = {"heads": heads, "dim": dim, "plan": plan, "dtype": dtype, **more}
                    lens = [*kernel_cases.RAGGED, 700]
                    name = f"decode {heads} of {dim}, plan {plan}, {dtype} {more}"
                    yield name, partial(decoded, lens, how)


def decoded(seq_lens: list[int], how: dict[str, Any]) -> list[Any]:
    return [kernel_cases.PagedSequences(seq_lens, **how).run()]


def digest(outputs: list[Any]) -> str:
    arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in outputs]
    mx.eval(arrays)  # a token among them writes the store among them
    sha = hashlib.sha256()
    for array in (a for a in arrays if a.size > 8):  # the values of a token mean nothing
        sha.update(bytes(memoryview(array.astype(mx.float32))))
    return sha.hexdigest()[:16]


def main() -> None:
    where = installed(writable_inputs=kernel_runs.STORE) if backend.is_cpu() else nullcontext()
    with where:
        for name, run in cases():
            print(f"{digest(run())}  {name.replace('mlx.core.', '')}", flush=True)


if __name__ == "__main__":
    main()
