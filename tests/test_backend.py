"""What the package does to MLX before its first import."""

import sys
from unittest.mock import Mock

import pytest

from vllm_metal_lite import backend, envs
from vllm_metal_lite.errors import ConfigError

NAME = "MLX_MAX_MB_PER_BUFFER"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setenv(NAME, "1")  # so that the end of the test restores what was there
    monkeypatch.delenv(NAME)


@pytest.fixture
def mac(monkeypatch):
    """A Mac with this number of GiB of memory; None: the system does not tell."""

    def with_memory(gib: float | None, system: str = "darwin") -> None:
        unknown = Mock(side_effect=ValueError("unrecognized configuration name"))
        pages = {"SC_PAGE_SIZE": 1 << 14, "SC_PHYS_PAGES": int((gib or 0) * 2**16)}
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(backend.os, "sysconf", pages.__getitem__ if gib else unknown)

    return with_memory


@pytest.mark.parametrize(("gib", "limit"), [(8, "50"), (16, "50"), (64, "192"), (512, "1536")])
def test_command_buffers_grow_with_memory(mac, gib, limit):
    mac(gib)
    backend._widen_command_buffers()
    assert backend.os.environ[NAME] == limit


def test_a_user_s_limit_stays(mac, monkeypatch):
    mac(64)
    monkeypatch.setenv(NAME, "40")
    backend._widen_command_buffers()
    assert backend.os.environ[NAME] == "40"


@pytest.mark.parametrize(("gib", "system"), [(64, "linux"), (None, "darwin")])
def test_nothing_is_set_elsewhere_or_without_the_size_of_memory(mac, gib, system):
    mac(gib, system)
    backend._widen_command_buffers()
    assert NAME not in backend.os.environ


@pytest.mark.parametrize("value", ["", "auto", "cpu", "cuda", "gpu"])
def test_devices_that_can_be_named(monkeypatch, value):
    monkeypatch.setenv("METAL_LITE_DEVICE", value)
    assert envs.device() == value


def test_another_device_is_an_error_with_what_is_possible(monkeypatch):
    monkeypatch.setenv("METAL_LITE_DEVICE", "metal")
    with pytest.raises(ConfigError, match="one of auto, cpu, cuda, gpu, got 'metal'"):
        envs.device()


@pytest.mark.parametrize(
    ("architecture", "macos", "expected"),
    [
        ("applegpu_g17s", "26.2", True),
        ("applegpu_g17p", "26.2", False),  # of a phone
        ("applegpu_g18p", "27.0.1", True),
        ("applegpu_g16c", "26.2", False),
        ("applegpu_g17s", "16.2", True),  # as told to a Python built for an older system
        ("applegpu_g17s", "26.1", False),
        ("applegpu_g17s", "15.7", False),
        ("applegpu_g17s", "", False),
        ("", "26.2", False),
    ],
)
def test_neural_accelerators_need_the_gpu_and_the_system(architecture, macos, expected):
    assert backend.neural_accelerators(architecture, macos) is expected


def test_other_backends_have_no_neural_accelerators():
    assert backend.name() == "metal" or not backend.has_neural_accelerators()
