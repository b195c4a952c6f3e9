"""Claude Code, Codex and OpenCode do real work through our server.

The weights cannot code, so the model is scripted (tests/support/chat/scripted/model.py): its
answers are prepared, and all else is real: template, tokenizer, scheduler, store, sampler, parser
and server.
"""

import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from tests.agents.kit import Agent, Session, agent, installed, run
from tests.support.chat.scripted_model import TASKS, call, text, write_scripted

KINDS = ("claude", "codex", "opencode")
ENDLESS = "word " * 20_000

pytestmark = pytest.mark.long


def script(kind: str, folder: Path, word: str, thoughts: str = "") -> list[dict]:
    """Read a file, edit it, run a command, and say so."""
    file, command = str(folder / "a.txt"), f"cat a.txt > {word}.txt; echo 'done: é\"'"
    edit = ("the first", f"the {word}")
    answers = {
        "claude": [
            call("Read", file_path=file),
            call("Edit", file_path=file, old_string=edit[0], new_string=edit[1]),
            call("Bash", command=command, description="Copies the file"),
        ],
        "codex": [
            call("exec_command", cmd="cat a.txt"),
            call("exec_command", cmd=f"sed -i 's/{edit[0]}/{edit[1]}/' a.txt"),
            call("exec_command", cmd=command),
        ],
        "opencode": [
            call("read", filePath=file),
            call("edit", filePath=file, oldString=edit[0], newString=edit[1]),
            call("bash", command=command, description="Copies the file"),
        ],
    }[kind]
    said = [*answers, text(f"The {word} is done.")]
    return [{**answer, "reasoning_content": thoughts} for answer in said] if thoughts else said


def check(session: Session, agents: Sequence[Agent], words: Sequence[str]) -> None:
    """Each of the first agents has done its own task, and nothing is left in the server."""
    for at, word, code, output in zip(agents, words, session.codes, session.outputs, strict=False):
        assert code == 0, output
        assert (at.folder / "a.txt").read_text() == f"the {word} line\n", output
        assert (at.folder / f"{word}.txt").read_text() == f"the {word} line\n", output
        assert f"The {word} is done." in output
    assert session.is_quiet, session.status
    assert session.status["models"][0]["metrics"]["failed_kernels"] == 0


@pytest.mark.parametrize(
    ("template", "hybrid", "thoughts"),
    [
        pytest.param("Qwen-Qwen3-4B-Instruct-2507", False, "", marks=pytest.mark.thorough),
        ("Qwen3.5-4B", True, "I look at the file first,\nand then I go on."),
    ],
    ids=["attention", "hybrid"],
)
def test_each_agent_does_its_task(tmp_path, template, hybrid, thoughts):
    installed()
    words = TASKS[:3]
    agents = [agent(tmp_path, kind, word) for kind, word in zip(KINDS, words, strict=True)]
    scripts = {
        word: script(kind, at.folder, word, thoughts)
        for kind, at, word in zip(KINDS, agents, words, strict=True)
    }
    model = write_scripted(tmp_path / "model", scripts, template=template, hybrid=hybrid)
    session = run(model, agents, tmp_path)
    check(session, agents, words)
    # Four requests of each agent, all but its first behind a prompt that is there; one for a title.
    assert len(session.hits) == 13, session.log
    assert session.hits[-9] >= 0.9, session.log


@pytest.mark.thorough
def test_each_agent_reads_a_picture_and_goes_on(tmp_path):
    """A bright picture; without a picture the model would say that it is dark."""
    installed()
    words, agents, scripts = TASKS[:3], [], {}
    for kind, word in zip(KINDS, words, strict=True):
        agents.append(agent(tmp_path, kind, word))
        file = agents[-1].folder / "shot.png"
        Image.new("RGB", (64, 64), "white").save(file)
        looks = {
            "claude": call("Read", file_path=str(file)),
            "codex": call("view_image", path=str(file)),
            "opencode": call("read", filePath=str(file)),
        }
        scripts[word] = [looks[kind], text(f"{word}: dark."), text(f"{word}: bright.")]
    model = write_scripted(tmp_path / "model", scripts, template="Qwen3.5-4B", sees=True)
    session = run(model, agents, tmp_path)
    for word, code, output in zip(words, session.codes, session.outputs, strict=True):
        assert code == 0, output
        assert f"{word}: bright." in output
    assert session.is_quiet, session.status
    # Two requests of each agent, and one for a title.
    assert len(session.hits) == 7, session.log
    assert session.hits[-3] >= 0.9, session.log


@pytest.mark.thorough
def test_agents_side_by_side_do_not_mix_and_killed_ones_leave_nothing(tmp_path):
    """Eight at once: five that work, and one of each kind that is killed in mid-stream."""
    installed()
    kinds = (*KINDS, "claude", "codex")
    words, others = TASKS[: len(kinds)], TASKS[len(kinds) :]
    agents = [agent(tmp_path, kind, word) for kind, word in zip(kinds, words, strict=True)]
    scripts = {
        word: script(kind, at.folder, word)
        for kind, at, word in zip(kinds, agents, words, strict=True)
    }
    killed = [agent(tmp_path, k, word, kill=True) for k, word in zip(KINDS, others, strict=True)]
    endless = {word: [ENDLESS] for word in others}
    model = write_scripted(tmp_path / "model", {**scripts, **endless})
    session = run(model, [*agents, *killed], tmp_path)
    assert session.streaming, session.status
    # The answer of each kind had begun.
    cut_short = re.findall(r"(msg|resp|chatcmpl)\S+: .* [1-9]\d* new .*cut short", session.log)
    assert set(cut_short) == {"msg", "resp", "chatcmpl"}, session.log
    assert session.codes[len(agents) :] == [-signal.SIGKILL] * len(killed)
    check(session, agents, words)
