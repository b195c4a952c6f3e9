"""Coding agents from npm, and their sessions with our server in a closed network."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 400  # of the agents' work
FOLDER = ROOT / "models" / "agents"  # which git ignores
PACKAGES = ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.169.0", "opencode-ai@1.18.33")


@cache
def installed() -> Path:
    """The folder of the agents' programs; skips the test where they cannot run."""
    for program in ("node", "npm", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here")
    if subprocess.run([*_unshare(), "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    done = FOLDER / "installed"
    if not done.exists() or done.read_text() != " ".join(PACKAGES):
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(FOLDER), *PACKAGES]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if run.returncode:
            pytest.skip(f"the agents cannot be installed: {run.stderr[-300:]}")
        done.write_text(" ".join(PACKAGES))
    return FOLDER / "node_modules" / ".bin"


def _unshare() -> list[str]:
    return ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]


@dataclass(frozen=True)
class Agent:
    """One agent at work.  folder: its repository.  kill: in mid-stream, when others are done."""

    folder: Path
    home: Path
    command: Sequence[str]
    kill: bool = False


def agent(scratch: Path, kind: str, word: str, kill: bool = False) -> Agent:
    """An agent with a repository of one file, asked to do the task of a word.

    The agent may do anything there.
    """
    folder, home = scratch / f"{kind}-{word}", scratch / f"home-{kind}-{word}"
    folder.mkdir(parents=True)
    home.mkdir()
    (folder / "a.txt").write_text("the first line\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    for step in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *step], check=True)
    ask = f"Please do the task: {word}."
    may_edit = ["--allowedTools", "Read,Edit,Bash", "--permission-mode", "acceptEdits"]
    may_run = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    flags = {
        "claude": ["-p", ask, *may_edit],
        "codex": ["exec", *may_run, ask],
        "opencode": ["run", ask],
    }
    return Agent(folder, home, [kind, "--", *flags[kind]], kill)


@dataclass(frozen=True)
class Session:
    """What session.py prints.  streaming: agents to be killed were all in mid-stream."""

    streaming: bool
    codes: list[int]
    outputs: list[str]
    status: dict[str, Any]
    is_quiet: bool
    log: str

    @property
    def hits(self) -> list[float]:
        """The share of each request's prompt that was cached, in ascending order."""
        found = re.findall(r"(\d+) prompt tokens \((\d+) cached\)", self.log)
        return sorted(int(cached) / int(prompt) for prompt, cached in found)


def run(model: Path, agents: Sequence[Agent], scratch: Path) -> Session:
    """Run a server and agents until all have ended."""
    session = scratch / "session.json"
    flags = ["--num-blocks", "6000", "--max-num-seqs", "8", "--max-model-len", "65536"]
    serve = [str(model), "--trust-remote-code", *flags]
    job = {"serve": serve, "agents": list(map(vars, agents)), "seconds": SECONDS}
    session.write_text(json.dumps(job, default=str))
    path = f"{installed()}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "METAL_LITE_DEVICE": "cpu"}
    command = [*_unshare(), sys.executable, str(ROOT / "tests" / "agents" / "session.py")]
    done = subprocess.run(
        [*command, str(session)], env=env, capture_output=True, text=True, timeout=SECONDS + 300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return Session(**json.loads(done.stdout))
