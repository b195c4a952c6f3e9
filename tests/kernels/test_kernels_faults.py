"""The strict front end on the kernels of metal/, and faults seeded into them.

Each seeded fault has to be reported by its kind, or, where the checker has nothing to object to, to
show in the result.
"""

from contextlib import contextmanager

import numpy as np
import pytest

from metal.host import HostError, KernelFault, compiler_available, installed, mlx_source
from tests.support.kernel_runs import RUN, STORE, kv_write
from tests.support.seeded_faults import FAULTS
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import source

pytestmark = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")


@contextmanager
def on_host(**settings):
    with installed(writable_inputs=STORE, **settings):
        yield


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


def outcome(kernel, **settings):
    """What a run gives: its outputs in float64, or the kind of the fault."""
    try:
        with on_host(**settings):
            outputs = RUN[kernel](mx.float32)
            return [np.array(a).astype(np.float64) for a in outputs]
    except KernelFault as fault:
        return fault.kind


@pytest.fixture(scope="module")
def right():
    """The outputs of every kernel as it is, under the checker: reported faults fail here."""
    given = {kernel: outcome(kernel, checked=True, schedule=3) for kernel in RUN}
    assert not [kind for kind in given.values() if isinstance(kind, str)]
    return given


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_noticed(name, right, monkeypatch):
    kernel, old, number, new, expected = FAULTS[name]
    file, read = kernel.split("/")[0], source.read
    parts = source.MARKER.join(read(file)).split(old)
    assert number + 1 < len(parts), f"{file} has no {old!r}: the fault is not seeded"
    text = old.join(parts[: number + 1]) + new + old.join(parts[number + 1 :])
    mutant = tuple(text.split(source.MARKER))
    monkeypatch.setattr(source, "read", lambda k: mutant if k == file else read(k))
    for schedule in ("forward", 4):
        found = outcome(kernel, checked=True, schedule=schedule)
        if not isinstance(found, str):
            same = all(map(np.array_equal, found, right[kernel]))
            found = "nothing" if same else "wrong"
        assert found in expected


def test_the_store_is_written_only_if_that_is_allowed():
    with installed(checked=True), pytest.raises(KernelFault, match="read-only"):
        kv_write(mx.float32)
