"""The CPU time, memory and open files of other processes."""

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process; 0 if the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_gb(pid: int) -> float:
    """The used memory of a GPU that nvidia-smi finds; otherwise the resident memory of a server."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if done.returncode == 0:
            return float(done.stdout.split()[0]) * 2**20 / 1e9
    command = ["ps", "-A", "-o", "pid=,ppid=,rss="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows, family = [tuple(map(int, line.split())) for line in listed.splitlines()], {pid}
    while more := {one for one, parent, _ in rows if parent in family} - family:
        family |= more
    return sum(kilobytes for one, _, kilobytes in rows if one in family) * 1024 / 1e9


def rss_mib(pid: int) -> float | None:
    """Resident memory of one process; None: it has ended."""
    done = subprocess.run(
        ["ps", "-o", "stat=,rss=", "-p", str(pid)], capture_output=True, text=True
    )
    state, _, kilobytes = done.stdout.strip().partition(" ")
    return int(kilobytes) / 1024 if state and state[0] != "Z" else None


def num_fds(pid: int) -> int:
    """The number of open files; -1 if the system does not tell."""
    folder = Path(f"/proc/{pid}/fd")
    return len(os.listdir(folder)) if folder.exists() else -1


@contextmanager
def sampled_memory(pid: int) -> Iterator[Callable[[], float]]:
    """Yields a function: the peak of a server's memory since its last call, in GB, sampled once a
    second."""
    peak, ended = 0.0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(1):
            peak = max(peak, memory_gb(pid))

    def peak_gb() -> float:
        nonlocal peak
        found, peak = max(peak, memory_gb(pid)), 0.0
        return found

    threading.Thread(target=sample, daemon=True).start()
    try:
        yield peak_gb
    finally:
        ended.set()
