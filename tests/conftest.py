"""What all tests share."""

import asyncio
import gc
import inspect
import os
import signal
import tempfile
from importlib.util import find_spec

# Before anything imports MLX: tests run where mlx-lm's own CPU answers are the oracle, and never
# ask a network for a model.
os.environ.setdefault("METAL_LITE_DEVICE", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
# One process a core: threads of a BLAS that wait for each other spin, and on a loaded machine an
# agent's task took 40 s instead of 16.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

import vllm_metal_lite.backend  # noqa: F401  (loads a fast BLAS before anybody imports MLX)

# A shell that starts the tests in the background ignores Ctrl-C, and so would what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

pytest_plugins = ["tests.support.which_tests", "tests.support.kernels.line_coverage"]


def pytest_terminal_summary(terminalreporter):
    if find_spec("vllm") is None:
        terminalreporter.line("no vLLM here for the plugin's tests: see tools/dev/vllm_env.sh")


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have the folder of their parent
        # Findings about pretended devices are thrown away at the end.
        cache = tempfile.TemporaryDirectory()
        config.add_cleanup(cache.cleanup)
        os.environ["XDG_CACHE_HOME"] = cache.name


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine, which must end, in an event loop: that of the fixture
    `async_runner` if the test or its fixtures use one, else its own."""
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        runner = pyfuncitem.funcargs.get("async_runner", asyncio)
        runner.run(asyncio.wait_for(pyfuncitem.obj(**given), 600))
        return True


def pytest_collection_finish():
    """Freeze imported objects: each garbage collection would scan them for 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def a_gpu(monkeypatch, tmp_path):
    """A machine that seems to have a GPU; the CPU host executes its kernels."""
    from tests.support.kernels.device import gpu_on_host

    with gpu_on_host(monkeypatch, tmp_path):
        yield


@pytest.fixture(autouse=True)
def no_fault_of_ours(caplog):
    """Nothing is skipped or replaced because of an error of our own, unless a test seeds one, and
    then clears the log."""
    yield
    messages = [record.getMessage() for record in caplog.get_records("call")]
    assert [m for m in messages if "a fault of vllm-metal-lite" in m] == []
