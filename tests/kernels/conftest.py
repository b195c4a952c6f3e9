"""Who executes the kernels."""

import pytest

from metal.host import installed
from vllm_metal_lite import backend


@pytest.fixture(scope="module")
def host(request):
    """The CPU host, under the checker.  WRITTEN of a module: inputs that its kernel writes."""
    written = getattr(request.module, "WRITTEN", ())
    with installed(checked=True, schedule=3, writable_inputs=written):
        yield


@pytest.fixture(scope="module")
def host_or_gpu(request):
    """The same; with METAL_LITE_DEVICE=gpu MLX's GPU."""
    if backend.is_cpu():
        request.getfixturevalue("host")
