"""The folder of cached prefixes: the quota holds and no wrong byte is read, whatever happens.

What a file holds follows from its key, so every byte that is read can be checked.
"""

import errno
import fcntl
import hashlib
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest

from vllm_metal_lite.prefix_disk import folder as module
from vllm_metal_lite.prefix_disk.folder import Folder

ROOT = Path(__file__).parents[2]
SIZE = 20_000  # bytes of a file's content
TAKEN = 5 * 4096  # bytes that such a file takes of the quota
QUOTA = 12 * TAKEN

WRITER = """
import random, sys
from pathlib import Path
from tests.prefix_disk.test_folder import QUOTA, content, folder_at, key

folder, numbers = folder_at(Path(sys.argv[1])), random.Random(int(sys.argv[2]))
print("ready", flush=True)
for _ in range(int(sys.argv[3])):
    first = numbers.randrange(40)
    keys = [key(first + i) for i in range(numbers.randrange(1, 6))]
    folder.write(keys, [(k, content(k)) for k in keys])
"""


def key(number: int) -> bytes:
    return hashlib.md5(str(number).encode()).digest()


def content(key: bytes) -> bytes:
    return (key * (SIZE // 16 + 1))[:SIZE]


def folder_at(path: Path, quota: int = QUOTA) -> Folder:
    folder = Folder(path, quota, "a model")
    folder.free_margin = 0
    return folder


def write(folder: Folder, *numbers: int) -> int:
    keys = [key(number) for number in numbers]
    return folder.write(keys, [(k, content(k)) for k in keys])


def bytes_on_disk(path: Path) -> int:
    """The bytes of all files but the lock."""
    total = 0
    for file in path.glob("*/*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def check(path: Path, quota: int = QUOTA) -> int:
    """Check the quota and the content of all files; returns the number of files."""
    assert bytes_on_disk(path) <= quota
    folder = folder_at(path, quota)
    assert not list((path / "tmp").iterdir())
    assert sum(num_bytes for *_, num_bytes in folder.models()) <= quota
    good = len(folder.known)
    assert all(folder.read(known) == content(known) for known in folder.known)
    assert folder.verify() == (good, 0)
    assert folder.models() == ([("a model", good, good * TAKEN)] if good else [])
    return good


def start_writer(path: Path, seed: int, rounds: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(path), str(seed), str(rounds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout.readline() == b"ready\n"
    return process


def test_what_is_written_is_read_after_a_restart(tmp_path):
    folder = folder_at(tmp_path / "x.noindex")
    assert write(folder, 1, 2, 3) == 3 * SIZE
    assert write(folder, 1, 2, 3, 4) == SIZE
    assert check(tmp_path / "x.noindex") == 4


def test_nobody_else_may_read(tmp_path):
    path = tmp_path / "x.noindex"
    path.mkdir(0o700)  # by a process that was killed then
    write(folder_at(path), 1, 2)
    assert (path / "CACHEDIR.TAG").exists()
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in path.rglob("*")}
    for p, mode in modes.items():
        assert p.name == "CACHEDIR.TAG" or mode == (0o700 if p.is_dir() else 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_least_recently_used_goes_first_and_the_end_of_a_chain_before_its_beginning(tmp_path):
    folder = folder_at(tmp_path / "x", 4 * TAKEN)
    write(folder, 1, 2)
    write(folder, 11, 12)
    folder.write([key(1), key(2)], [])
    write(folder, 21)
    assert folder.known == {key(n) for n in (1, 2, 11, 21)}
    write(folder, 22, 23)
    assert folder.known == {key(n) for n in (1, 22, 21, 23)}


def test_a_chain_longer_than_the_quota_keeps_its_beginning(tmp_path):
    folder = folder_at(tmp_path / "x", 3 * TAKEN)
    assert write(folder, *range(6)) == 3 * SIZE
    assert folder.known == {key(n) for n in range(3)}
    assert write(folder, *range(6)) == 0


@pytest.mark.parametrize("quota", [0, TAKEN - 1, TAKEN])
def test_quota_of_at_most_one_file(tmp_path, quota):
    folder = folder_at(tmp_path / "x", quota)
    for number in range(4):
        write(folder, number)
        assert len(folder.known) == quota // TAKEN
    check(tmp_path / "x", quota)


def test_a_smaller_quota_holds_at_once(tmp_path):
    write(folder_at(tmp_path / "x"), *range(10))
    folder_at(tmp_path / "x", 3 * TAKEN)
    assert check(tmp_path / "x", 3 * TAKEN) == 3


def test_nothing_is_written_to_a_disk_that_is_nearly_full(tmp_path):
    folder = Folder(tmp_path / "x", QUOTA)
    folder.free_margin = 1 << 60
    assert write(folder, 1) == 0


def test_a_disk_that_fills_up_leaves_no_bytes(tmp_path, monkeypatch):
    folder = folder_at(tmp_path / "x")
    write(folder, 1)
    fsync, left = os.fsync, [1]

    def full(fd: int) -> None:
        if not left:
            raise OSError("No space left on device")
        left.pop()
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(folder, 2, 3, 4)
    assert folder.known == {key(1), key(2)}
    assert check(tmp_path / "x") == 2


def test_foreign_files_are_dropped(tmp_path):
    folder = folder_at(tmp_path / "x")
    write(folder, 1, 2, 3)
    folder.path_of(key(1)).write_bytes(b"short")
    folder.path_of(key(3)).unlink()  # as another process does, and not bad
    (folder.path_of(key(2)).parent / "foreign").write_bytes(b"of somebody")
    assert folder.read(key(1)) is None
    assert folder.verify() == (1, 1)
    assert check(tmp_path / "x") == 1


@pytest.mark.parametrize(("number", "is_kept"), [(errno.EMFILE, True), (errno.EIO, False)])
def test_a_file_that_cannot_be_read_is_kept_only_if_too_many_are_open(
    tmp_path, monkeypatch, number, is_kept
):
    folder = folder_at(tmp_path / "x")
    write(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=OSError(number, "not now")))
        assert folder.verify() == (0, 1)
    assert folder.read(key(1)) == (content(key(1)) if is_kept else None)
    assert (key(1) in folder.known) == is_kept


def replace_by(path: Path, kind: str) -> None:
    """Replace a file or folder by something else."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if kind == "folder":
        (path / "more").mkdir(parents=True)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("nowhere")
    else:
        path.write_bytes(b"?" * 5000 if kind == "bytes" else b"")


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "bytes", "empty"])
@pytest.mark.parametrize("name", ["lock", "tmp", "tmp/new", "file"])
def test_anything_instead_of_a_file_goes(tmp_path, name, kind):
    path = tmp_path / "x"
    folder = folder_at(path)
    write(folder, 1, 2, 3)
    file = folder.path_of(key(1))
    for place in [file, file.parent] if name == "file" else [path / name]:
        replace_by(place, kind)
        folder = folder_at(path)
        good = [folder.read(key(n)) for n in (1, 2, 3)]
        assert good == [
            None if name == "file" else content(key(1)),
            *map(content, map(key, (2, 3))),
        ]
        write(folder, 1, 4)
        assert folder.read(key(1)) == content(key(1))
    folder = folder_at(path)
    folder.clear()
    assert bytes_on_disk(path) == 0


def test_the_order_of_uses_survives_a_restart_with_a_clock_that_was_set_back(tmp_path, monkeypatch):
    write(folder_at(tmp_path / "x"), 1, 2)
    monkeypatch.setattr(module.time, "time_ns", lambda: 5)
    write(folder_at(tmp_path / "x"), 11, 12)
    folder_at(tmp_path / "x").write([key(2)], [])
    assert folder_at(tmp_path / "x", 2 * TAKEN).known == {key(11), key(2)}


def test_a_folder_that_is_removed_or_cleared_while_two_engines_run(tmp_path):
    path = tmp_path / "x"
    one, other = folder_at(path), folder_at(path)
    for remove in lambda: shutil.rmtree(path), lambda: folder_at(path).clear():
        write(one, 1, 2)
        remove()
        assert write(other, 3, 4) == 2 * SIZE
        one.refresh()
        assert one.known == other.known == {key(3), key(4)}
    assert check(path) == 2


def test_a_folder_that_another_process_locks_is_left_as_it_is(tmp_path, monkeypatch):
    write(folder_at(tmp_path / "x"), 1, 2)
    with monkeypatch.context() as patch, (tmp_path / "x" / "lock").open() as other:
        patch.setattr(module, "_LONGEST_WAIT", 0.1)
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"another process has locked it for 0\.1 s"):
            folder_at(tmp_path / "x")
    assert check(tmp_path / "x") == 2


def test_clear_removes_all_models(tmp_path):
    folder = folder_at(tmp_path / "x")
    write(folder, 1)
    folder._model = "another model"
    write(folder, 2, 3)
    assert folder.models() == [("another model", 2, 2 * TAKEN), ("a model", 1, TAKEN)]
    (folder.path_of(key(1)).parent / "foreign").write_bytes(b"not in the index")
    folder.clear()
    assert not folder.known
    assert bytes_on_disk(tmp_path / "x") == 0


def test_one_process_finds_what_another_wrote(tmp_path):
    one, other = folder_at(tmp_path / "x"), folder_at(tmp_path / "x")
    write(one, 1, 2)
    assert not other.known
    other.refresh()
    assert other.known == one.known
    assert other.read(key(2)) == content(key(2))


def test_a_file_that_another_process_is_writing_is_not_dropped(tmp_path, monkeypatch):
    one, other = folder_at(tmp_path / "x"), folder_at(tmp_path / "x")
    write_file, read_file, missed = module.write_file, module.read_file, Event()

    def read(path: Path, key: bytes) -> memoryview:
        try:
            return read_file(path, key)
        finally:
            missed.set()

    def write_late(path: Path, key: bytes, *rest: object) -> None:
        reads.append(threads.submit(other.read, key))
        missed.wait()
        write_file(path, key, *rest)

    reads: list[Future] = []
    monkeypatch.setattr(module, "read_file", read)
    monkeypatch.setattr(module, "write_file", write_late)
    with ThreadPoolExecutor(1) as threads:
        write(one, 1)
    assert reads[0].result() == content(key(1))


def test_two_processes_write_at_once(tmp_path):
    path = tmp_path / "x"
    writers = [start_writer(path, seed, 30) for seed in (1, 2)]
    watcher = folder_at(path)
    while any(writer.poll() is None for writer in writers):
        with watcher._locked():  # nobody renames a file while they are counted
            assert bytes_on_disk(path) <= QUOTA
    assert [writer.returncode for writer in writers] == [0, 0]
    assert check(path) > 0


@pytest.mark.parametrize(
    "times",
    [6, pytest.param(40, marks=pytest.mark.long), pytest.param(200, marks=pytest.mark.thorough)],
)
def test_killed_at_any_moment(tmp_path, times):
    path, numbers = tmp_path / "x", random.Random(7)
    for seed in range(times):
        writer = start_writer(path, seed, 10**6)
        time.sleep(numbers.random() / 10)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        check(path)


def test_a_folder_of_2_000_files_opens(tmp_path):
    folder = folder_at(tmp_path / "x")
    for n in range(2_000):
        path = folder.path_of(key(n))
        path.parent.mkdir(exist_ok=True)
        path.touch()
    begun = time.process_time()
    folder = folder_at(tmp_path / "x")
    assert time.process_time() - begun < 1
    assert len(folder.known) == 2_000
