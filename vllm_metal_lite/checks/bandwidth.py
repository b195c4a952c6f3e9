"""How fast this device copies memory."""

from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import timing

_CHAIN = 5  # copies in a row, which keep the device busy


def copy_bandwidth(size: int = 256 << 20) -> float:
    """Bytes read plus written per second by an elementwise operation on `size` bytes."""
    x = mx.zeros(size // 4, mx.float32)
    mx.eval(x)

    def chains(count: int) -> None:
        for _ in range(count):
            y = x
            for _ in range(_CHAIN):
                y = y + 1
            mx.eval(y)

    return 2 * size * _CHAIN / timing.seconds_alternating([chains])[0]
