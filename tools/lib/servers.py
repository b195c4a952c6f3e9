"""Starts this server and others for a tool, and measures their CPU time and memory."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from vllm_metal_lite import MetalLiteError
from vllm_metal_lite.cli.launch import end_process

ROOT = Path(__file__).resolve().parents[2]


def ours(model: Path | str, *flags: str, trusted: bool = False) -> list[str]:
    """The command of this server.  trusted: without the checks and timings of a first start."""
    module = "tools.bench.lib.trust" if trusted else "vllm_metal_lite"
    return [sys.executable, "-m", module, "serve", str(model), "--port", "PORT", *flags]


def mlx_lm(model: Path, *flags: str) -> list[str]:
    """The command of mlx-lm's server, with a queue for clients that come at once: its own holds 5,
    and Linux resets the others."""
    start = "from http.server import HTTPServer; HTTPServer.request_queue_size = 128; "
    start += "from mlx_lm.server import main; main()"
    words = ["--model", str(model), "--port", "PORT", "--log-level", "WARNING"]
    return [sys.executable, "-c", start, *words, *flags]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def server(command: Sequence[str], log: Path) -> Iterator[tuple[str, int]]:
    """A server that answers; yields its URL and its process's id.  PORT in the command is replaced
    by a free port."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(port) if part == "PORT" else part for part in command]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            while not _answers(url):
                if process.poll() is not None:
                    tail = "\n".join(log.read_text().splitlines()[-15:])
                    raise MetalLiteError(f"{shlex.join(command[:4])} does not start:\n{tail}")
                time.sleep(0.2)
            yield url, process.pid
        finally:
            end_process(process, 20)


def _answers(url: str) -> bool:
    for path in "/health", "/v1/models":
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}{path}", timeout=2, trust_env=False).is_success:
                return True
    return False


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process; 0 if the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_gb(pid: int) -> float:
    """Memory of the GPU if nvidia-smi knows one, else resident memory of a server's processes."""
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
