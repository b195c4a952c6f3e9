"""An error of our own code is no finding about a kernel: it is called what it is."""

import re

import pytest

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import attention, speed
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.run_check import run
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.launch import Kernel, KernelError, is_of_device, one_by_one
from vllm_metal_lite.kernels.timing import timed_once
from vllm_metal_lite.specs import AttentionShape

CHECK = Check("gather_rows", AttentionShape(4, 2, 32, 32, mx.float32))
THREADS = (
    "Thread group size (1024) is greater than  the maximum allowed threads per threadgroup (896)."
)
FOUND = [
    RuntimeError("[metal::Device] Unable to build metal library"),
    ValueError(THREADS),
    MemoryError("no room"),
    OSError("no file"),
]
OURS = [
    TypeError("takes 2 arguments"), AttributeError("no x"), KeyError("x"), IndexError("3"),
    AssertionError("no"), NameError("x"), ImportError("x"), ZeroDivisionError("x"),
    ValueError("x must be (3, 4), not (3, 5)"),
]  # fmt: skip


def raising(error):
    def raises(*_, **__):
        raise error

    return raises


@pytest.mark.parametrize("error", FOUND, ids=repr)
def test_what_a_compiler_or_a_device_raises_is_a_finding(monkeypatch, caplog, error):
    monkeypatch.setattr(speed, "measure", raising(error))
    monkeypatch.setattr(attention, "reorder", lambda check: 0.5)
    timed = run(CHECK, timed=True)
    assert (timed.passed, timed.timing_failed) == (True, True)
    monkeypatch.setattr(attention, "reorder", raising(error))
    assert run(CHECK).failure == " ".join(str(error).split())
    assert timed_once("a key", "skinny_gemm", "a product", raising(error)) is None
    assert "skinny_gemm is not used: a product cannot be timed" in caplog.text
    monkeypatch.setattr(Kernel, "_launcher", lambda self: raising(error))
    with one_by_one(), pytest.raises(KernelError, match="add_rms_norm"):
        launch()


@pytest.mark.parametrize("error", OURS, ids=repr)
def test_any_other_error_is_a_fault_of_ours(monkeypatch, caplog, error):
    said = rf"a fault of vllm-metal-lite: {type(error).__name__} in tests.*, line \d+: "
    assert not is_of_device(error)
    monkeypatch.setattr(speed, "measure", raising(error))
    monkeypatch.setattr(attention, "reorder", lambda check: 0.5)
    assert re.match(said, run(CHECK, timed=True).failure)
    monkeypatch.setattr(attention, "reorder", raising(error))
    assert re.match(said, run(CHECK).failure)
    assert timed_once("a key", "skinny_gemm", "a product", raising(error)) is None
    assert re.search(said, caplog.text)
    assert "Traceback" in caplog.text
    caplog.clear()
    monkeypatch.setattr(Kernel, "_launcher", lambda self: raising(error))
    with one_by_one(), pytest.raises(type(error)) as raised:
        launch()
    assert raised.value is error


def launch():
    x = mx.ones((2, 64))
    return add_rms_norm(x, x, None, 1e-5)
