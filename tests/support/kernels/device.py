"""Another device, as far as devices.py says what a device is."""

from dataclasses import replace

import pytest

from vllm_metal_lite import backend, devices


def change_device(patch: pytest.MonkeyPatch, **changes) -> None:
    """Change fields of the present backend's DeviceProfile."""
    patch.setitem(devices.PROFILES, backend.name(), replace(devices.profile(), **changes))


def pretend_gpu(patch: pytest.MonkeyPatch) -> None:
    """A machine that seems to have a GPU."""
    patch.setattr(backend, "is_cpu", lambda: False)
    patch.setattr(backend, "memory_limit", lambda: 1 << 30)


def pad_to_powers_of_two(patch: pytest.MonkeyPatch) -> None:
    """Steps are padded as small ones are on a GPU."""
    change_device(patch, row_grains=((1 << 30, 0),))
