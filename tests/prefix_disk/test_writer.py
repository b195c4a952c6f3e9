"""Prefixes on their way to the disk: one that fails, or has no room, leaves the others alone."""

from itertools import chain, repeat
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest

from tests.prefix_disk.test_folder import SIZE, TAKEN, content, folder_at, key
from vllm_metal_lite.prefix_disk import writer as module
from vllm_metal_lite.prefix_disk.parts import Part
from vllm_metal_lite.prefix_disk.writer import DiskWriter


def parts_of(numbers: list[int]) -> list[Part]:
    """A part for each number.  The part of number 0 is larger than the quota."""
    return [Part(key(n), 0, key(n), SIZE if n else 9 * TAKEN) for n in numbers]


@pytest.fixture
def writer(tmp_path, monkeypatch) -> DiskWriter:
    """A writer that copies one file at a time, and has a quota of 8 files."""
    monkeypatch.setattr(module, "_COPIED", 1)
    kv = SimpleNamespace(block_size=16)
    parts = SimpleNamespace(kv=kv, are_kept=bool, may_be_cut=True, of=parts_of)
    writer = DiskWriter(folder_at(tmp_path / "x", 8 * TAKEN), parts, SimpleNamespace())
    sizes = {part.name: part.num_bytes for part in parts_of([*range(20)])}
    parts.place_of = lambda part: part.name
    writer._blocks.read = lambda group, place: memoryview(content(place).ljust(sizes[place], b"x"))
    return writer


def write(writer: DiskWriter, *prefixes: list[int]) -> set[bytes]:
    """Write prefixes, given by the numbers of their files; returns the keys that the folder has."""
    for numbers in prefixes:
        writer.add(numbers)
    while writer.waiting:
        writer.flush()
        writer.copy()
    writer.flush()
    return writer._folder.known


def test_the_rest_of_a_prefix_that_cannot_be_kept_is_left_out(writer, caplog):
    fail_twice = chain([TimeoutError("locked")] * 2, repeat(DEFAULT))
    writer._folder.refresh = Mock(wraps=writer._folder.refresh, side_effect=fail_twice)
    kept = write(writer, [1, 2, 3], [1, 2, 3], [4, 0, 5], [7, 8, 9])
    assert kept == {key(n) for n in (4, 7, 8, 9)}
    assert (writer._folder.num_errors, caplog.text.count("cannot write: locked")) == (2, 1)


def test_a_file_of_another_process_does_not_end_a_prefix(writer, tmp_path):
    other, read = folder_at(tmp_path / "x"), writer._blocks.read

    def read_late(group: int, place: bytes) -> memoryview:
        if place == key(2):
            other.write([place], [(place, content(place))])
        return read(group, place)

    writer._blocks.read = read_late
    assert write(writer, [1, 2, 3]) == {key(n) for n in (1, 2, 3)}


@pytest.mark.parametrize(("may_be_cut", "kept"), [(True, 8), (False, 0)])
def test_a_prefix_of_windows_or_states_is_kept_whole_or_not_at_all(writer, may_be_cut, kept):
    writer._parts.may_be_cut = may_be_cut
    assert len(write(writer, [*range(1, 10)])) == kept
    assert len(write(writer, [*range(1, 9)])) == 8
