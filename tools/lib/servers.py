"""Starts this server and others for a tool."""

import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tools.lib.frame import say
from vllm_metal_lite import MetalLiteError
from vllm_metal_lite.cli.launch import end_process
from vllm_metal_lite.errors import one_line

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 600  # seconds until a server answers: on MLX CUDA a first start takes minutes


def ours(model: Path | str, *flags: str, trusted: bool = False) -> list[str]:
    """The command of this server.  trusted: without the checks and timings of a first start."""
    module = "tools.lib.trust" if trusted else "vllm_metal_lite"
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
def server(command: Sequence[str], log: Path, **how: Any) -> Iterator[tuple[str, int]]:
    """A server that answers; yields its URL and its process's id.

    An error shows the end of the log.  PORT in the command is replaced by a free port.  how: more
    options of Popen.
    """
    port, end = free_port(), time.monotonic() + DEADLINE
    url = f"http://127.0.0.1:{port}"
    command = [str(port) if part == "PORT" else part for part in command]
    name = shlex.join(command[:4])
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, **{"cwd": ROOT, **how})
        try:
            while not _answers(url):
                if process.poll() is not None:
                    raise MetalLiteError(f"{name} ends with exit code {process.returncode}")
                if time.monotonic() > end:
                    raise MetalLiteError(f"{name} does not answer within {DEADLINE} s")
                time.sleep(0.2)
            yield url, process.pid
        except (MetalLiteError, httpx.HTTPError) as e:
            say("\n".join([f"{name}: the end of its log:", *log.read_text().splitlines()[-15:]]))
            raise MetalLiteError(one_line(e)) from e
        finally:
            end_process(process, 20)


def has_trace(log: Path) -> bool:
    """Whether a server's log has a trace, which is then printed."""
    text = log.read_text()
    if found := "Traceback" in text:
        print(f"the server's log has a trace:\n{text[-2000:]}")
    return found


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).is_success
    return False
