"""The profile of a device, and the tuned constants that are kept in the user's cache folder."""

import json
from dataclasses import fields, replace

import pytest

from vllm_metal_lite import backend, devices, tuned


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch, tmp_path):
    """A machine that seems to have a GPU, in a new process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(backend, "is_cpu", lambda: False)
    monkeypatch.setattr(backend, "memory_limit", lambda: 1 << 30)
    monkeypatch.setattr(devices, "IN_USE", {})


def change(**fields):
    file = tuned.path()
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_without_a_file_the_defaults_are_used(caplog):
    assert devices.profile() == devices.PROFILES[backend.name()]
    assert not caplog.text


def test_tuned_constants_take_the_place_of_the_defaults():
    tuned.store({"decode_fill": 64, "prefix_row_cost": 0.25})
    default = devices.PROFILES[backend.name()]
    found = devices.profile()
    assert found == replace(default, decode_fill=64, prefix_row_cost=0.25, tuned=found.tuned)
    assert found.tuned.startswith("20")


def test_the_file_is_read_once(monkeypatch):
    tuned.store({"decode_fill": 64})
    devices.profile()
    monkeypatch.setattr(tuned, "load", lambda: pytest.fail("read again"))
    assert devices.profile().decode_fill == 64


def test_a_cpu_has_no_tuned_profile(monkeypatch):
    tuned.store({"decode_fill": 64})
    monkeypatch.setattr(backend, "is_cpu", lambda: True)
    assert devices.profile().tuned is None


def test_removed_constants_are_gone():
    assert not tuned.remove()
    tuned.store({"decode_fill": 64})
    assert tuned.remove()
    assert not list(tuned.path().parent.iterdir())
    assert devices.profile().tuned is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda: tuned.path().write_text("{"), "cannot be read"),
        (lambda: tuned.path().write_bytes(b"\xff"), "cannot be read"),
        (lambda: tuned.path().write_text("[]"), "another form"),
        (lambda: change(schema=99), "another form"),
        (lambda: change(constants=[1]), "another form"),
        (lambda: change(device="metal: Apple M9"), "device is 'metal: Apple M9', here"),
        (lambda: change(mlx="0.1"), "mlx is '0.1', here"),
        (lambda: change(constants={"decode_fill": 0}), "decode_fill must be from 8 to 4,096"),
        (lambda: change(constants={"decode_fill": 1e99}), "decode_fill must be a number"),
        (lambda: change(constants={"decode_fill": "64"}), "decode_fill must be a number"),
        (lambda: change(constants={"decode_fill": True}), "decode_fill must be a number"),
        (lambda: change(constants={"prefix_row_cost": float("nan")}), "must be from 0 to 1"),
        (lambda: change(constants={"memory_fraction": 1}), "no constant that can be tuned"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_line(damage, words, caplog):
    tuned.store({"decode_fill": 64})
    damage()
    assert devices.profile() == devices.PROFILES[backend.name()]
    assert devices.profile().tuned is None
    (record,) = caplog.records
    assert words in record.getMessage()
    assert "doctor --tune" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_what_can_be_tuned_is_a_number_of_every_profile_within_its_limits():
    names = {field.name for field in fields(devices.DeviceProfile)}
    for name, (low, high) in devices.TUNABLE.items():
        assert name in names
        for profile in devices.PROFILES.values():
            assert low <= getattr(profile, name) <= high


def test_using_puts_the_profile_back():
    before = devices.profile()
    with devices.using(replace(before, decode_fill=99)):
        assert devices.profile().decode_fill == 99
    assert devices.profile() == before
