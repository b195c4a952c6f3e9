"""Every kernel of metal/ under the strict front end, in several orders of threads, and with faults.

Each seeded fault has to be reported by its kind, or, where the checker has nothing to object to, to
show in the result.
"""

from functools import cache, partial

import numpy as np
import pytest

from metal.host import HostError, KernelFault, installed, mlx_source
from tests.support.kernels.attention_runs import kv_write
from tests.support.kernels.seeded_faults import FAULTS
from tests.support.kernels.table import RUN, WRITTEN
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import source

on_host = partial(installed, writable_inputs=WRITTEN)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", RUN)
def test_accepted_by_the_strict_front_end(kernel, dtype, monkeypatch):
    pytest.importorskip("ziglang", reason="the strict front end needs clang")
    from metal.host.strict import check

    texts = []
    generate = mlx_source.generated_source

    def only_the_text(*arguments):
        texts.append(generate(*arguments))
        raise HostError("only the text is wanted")

    monkeypatch.setattr(mlx_source, "generated_source", only_the_text)
    with on_host(), pytest.raises(HostError, match="only the text"):
        RUN[kernel](dtype)
    assert f"metal_lite_{kernel.split('/')[0]}" in texts[0]
    assert check(texts[0]) == []


def outcome(kernel, schedule):
    """The outputs of a run in float64, or the kind of the fault that the checker reports."""
    try:
        with on_host(checked=True, schedule=schedule):
            return [np.array(a).astype(np.float64) for a in RUN[kernel](mx.float32)]
    except KernelFault as fault:
        return fault.kind


@cache
def right(kernel):
    """The outputs of a kernel without a fault."""
    found = outcome(kernel, 3)
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize("kernel", RUN)
def test_the_order_of_threads_changes_nothing(kernel):
    for schedule in ("forward", "reverse", 1):
        assert all(map(np.array_equal, outcome(kernel, schedule), right(kernel)))


@pytest.mark.thorough  # `.ci/run` tries all of them
@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_noticed(name, monkeypatch):
    fault = FAULTS[name]
    file, read, expected = fault.kernel.split("/")[0], source.read, right(fault.kernel)
    mutant = tuple(fault.seeded(source.MARKER.join(read(file))).split(source.MARKER))
    monkeypatch.setattr(source, "read", lambda k: mutant if k == file else read(k))
    monkeypatch.setenv("METAL_LITE_HOST_COVERAGE", "0")
    for schedule in ("forward", 4):
        found = outcome(fault.kernel, schedule)
        if not isinstance(found, str):
            found = "nothing" if all(map(np.array_equal, found, expected)) else "wrong"
        assert found in fault.kinds


def test_the_store_is_written_only_if_that_is_allowed():
    with installed(checked=True), pytest.raises(KernelFault, match="read-only"):
        kv_write(mx.float32)
