"""A server and coding agents in a network of their own, which has loopback only.

    unshare -n python session.py SESSION.json

SESSION.json: {"serve": [flags], "agents": [{"command": [], "folder", "home", "kill"}], "seconds"}.
Starts the server, then all agents at once, waits for them, and prints JSON: for each agent its exit
code and output; the server's lines and its last /status.  kill: an agent whose answer does not end;
those are killed in mid-stream, when the others are done.
"""

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "vllm_metal_lite"]
PORT = 8123
URL = f"http://127.0.0.1:{PORT}"


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        name = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(s, 0x8914, name)  # SIOCSIFFLAGS


def status() -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"{URL}/status", timeout=10) as reply:
            return json.load(reply)
    except OSError:
        return None


def start(agent: dict[str, Any]) -> subprocess.Popen:
    command = [*COMMAND, "launch", "--port", str(PORT), *agent["command"]]
    env = {**os.environ, "HOME": agent["home"], "PWD": agent["folder"]}
    for name in [n for n in env if n.startswith(("ANTHROPIC", "CLAUDE", "OPENAI", "CODEX"))]:
        del env[name]
    with Path(agent["home"], "output.txt").open("wb") as output:
        how = {"start_new_session": True, "stdin": subprocess.DEVNULL, "stdout": output}
        how |= {"stderr": subprocess.STDOUT, "cwd": agent["folder"], "env": env}
        return subprocess.Popen(command, **how)


def until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < end:
        time.sleep(0.2)
    return bool(done)


def end_all(agents: list[subprocess.Popen]) -> None:
    """Kill the agents that still run."""
    for process in agents:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(300)


def running() -> int:
    """Requests that the server answers."""
    now = status()
    return now["server"]["running"] if now else 0


def is_quiet() -> bool:
    now = status()
    if now is None:
        return False
    metrics = now["models"][0]["metrics"]
    return not (now["server"]["running"] or metrics["requests_running"] or metrics["blocks_owned"])


def main() -> int:
    session = json.loads(Path(sys.argv[1]).read_text())
    bring_up_loopback()
    command = [*COMMAND, "serve", "--port", str(PORT), "--log-requests", *session["serve"]]
    log = Path(sys.argv[1]).with_suffix(".log")
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out)
    agents: list[subprocess.Popen] = []
    try:
        if not until(lambda: status() or server.poll() is not None, 600) or server.poll():
            print(json.dumps({"log": log.read_text()}))
            return 1
        agents = [start(agent) for agent in session["agents"]]
        kills = [agent["kill"] for agent in session["agents"]]
        end = time.monotonic() + session["seconds"]
        workers = [process for process, kill in zip(agents, kills, strict=True) if not kill]
        until(lambda: all(process.poll() is not None for process in workers), session["seconds"])
        streaming = until(lambda: running() >= sum(kills), end - time.monotonic())
        end_all(agents)
        quiet = until(is_quiet, 300)
        last = status()
    finally:
        end_all(agents)
        server.terminate()
        server.wait(600)
    outputs = [Path(a["home"], "output.txt").read_text(errors="replace") for a in session["agents"]]
    codes = [process.returncode for process in agents]
    result = {"streaming": streaming, "codes": codes, "outputs": outputs, "is_quiet": quiet}
    print(json.dumps({**result, "status": last, "log": log.read_text()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
