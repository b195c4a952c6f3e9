"""An error of our own code is no finding about a kernel: it is called what it is."""

import pytest

from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks import attention, speed
from vllm_metal_lite.checks.check import Check
from vllm_metal_lite.checks.run_check import run
from vllm_metal_lite.kernels.add_rms_norm import add_rms_norm
from vllm_metal_lite.kernels.launch import KernelError, is_of_device, one_by_one
from vllm_metal_lite.kernels.timing import timed_once
from vllm_metal_lite.specs import AttentionShape

MEASURE = speed.measure
CHECK = Check("gather_rows", AttentionShape(4, 2, 32, 32, mx.float32))
THREADS = (
    "Thread group size (1024) is greater than  the maximum allowed threads per threadgroup (896)."
)
NO_LIBRARY = RuntimeError("[metal::Device] Unable to build metal library")
FOUND = [NO_LIBRARY, ValueError(THREADS), MemoryError("no room"), OSError("no file")]
NO_KEY = KeyError("x")
OURS = [NO_KEY, TypeError("2 arguments"), AssertionError("no"), NameError("x"), ImportError("x")]
OURS += [ValueError("x must be (3, 4), not (3, 5)")]


@pytest.mark.parametrize("error", FOUND + OURS, ids=repr)
def test_mlx_s_errors_are_told_from_ours(error):
    assert is_of_device(error) == (error in FOUND)


def raising(error):
    def raises(*_, **__):
        raise error

    return raises


@pytest.mark.parametrize("error", [NO_LIBRARY, NO_KEY], ids=repr)
def test_a_fault_of_ours_in_a_check_is_called_one(monkeypatch, error):
    said = "[metal" if error in FOUND else "a fault of vllm-metal-lite: KeyError in tests.checks"
    monkeypatch.setattr(attention, "reorder", raising(error))
    assert run(CHECK).failure.startswith(said)


@pytest.mark.parametrize("error", [NO_LIBRARY, NO_KEY], ids=repr)
def test_a_fault_of_ours_in_a_timing_is_no_lack_of_memory(monkeypatch, a_gpu, error):
    monkeypatch.setattr(attention, "timed_reorder", raising(error))
    monkeypatch.setattr(speed, "measure", MEASURE)
    result = run(CHECK, timed=True)
    assert (result.passed, result.timing_failed) == (error in FOUND,) * 2
    assert result.failure is None or result.failure.startswith("a fault of vllm-metal-lite")


@pytest.mark.parametrize("error", [NO_LIBRARY, NO_KEY], ids=repr)
def test_a_timing_at_the_start_logs_the_traceback_of_our_fault(caplog, tmp_path, error):
    assert timed_once("a key", "skinny_gemm", "a product", raising(error)) is None
    assert "skinny_gemm is not used: " in caplog.text
    assert ("a fault of vllm-metal-lite" in caplog.text) == (error in OURS)
    assert ("Traceback" in caplog.text) == (error in OURS)
    caplog.clear()


@pytest.mark.parametrize("error", [NO_LIBRARY, NO_KEY], ids=repr)
def test_a_fault_of_ours_in_a_launch_is_called_one(monkeypatch, error):
    """The kernel is replaced even so, and requests continue."""
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **_: raising(error))
    x = mx.ones((2, 64))
    with one_by_one(), pytest.raises(KernelError, match="add_rms_norm: ") as raised:
        add_rms_norm(x, x, None, 1e-5)
    assert raised.value.why.startswith("a fault of vllm-metal-lite") == (error in OURS)
