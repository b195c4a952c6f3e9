"""The fixtures that execute the kernels.  The host reports races and accesses out of bounds; in the
tests of attention, slots that no row of the step may read hold NaN, as do rows of padding."""

import pytest

from metal.host import installed
from vllm_metal_lite import backend


@pytest.fixture(scope="module")
def host(request):
    """The CPU host, under the checker.  A test module lists the inputs that its kernel writes in
    WRITTEN."""
    written = getattr(request.module, "WRITTEN", ())
    with installed(checked=True, schedule=3, writable_inputs=written):
        yield


@pytest.fixture(scope="module")
def host_or_gpu(request):
    """The host; with METAL_LITE_DEVICE=gpu the same cases run on MLX's GPU."""
    if backend.is_cpu():
        request.getfixturevalue("host")
