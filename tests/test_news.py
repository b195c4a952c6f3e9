"""Which tests a branch adds: they run with all their cases."""

import subprocess
from types import SimpleNamespace

import pytest

from tests.support.news import News

OLD = """import pytest


@pytest.mark.parametrize("x", [1, 2])
def test_old(x):
    assert x


def test_other():
    pass
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with the branch `main` -> its folder, and a function that calls git."""
    monkeypatch.delenv("GIT_DIR", raising=False)  # a hook of git sets it

    def git(*words):
        who = "-c", "user.name=a", "-c", "user.email=a@b"
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(OLD)
    git("add", "-A")
    git("commit", "-m", "first")
    git("checkout", "-b", "change")
    return tmp_path, git


class Item(SimpleNamespace):
    __hash__ = object.__hash__


def items(folder, *cases):
    """Items of pytest: the functions of test_a.py, and cases of test_old."""
    path, names = folder / "tests" / "test_a.py", {}
    exec(compile(path.read_text(), path, "exec"), names)
    plain = [Item(function=names["test_other"])]
    return plain + [
        Item(function=names["test_old"], callspec=SimpleNamespace(id=case)) for case in cases
    ]


def new(folder, *cases):
    found = News(folder).new_among(items(folder, *cases))
    return sorted(item.callspec.id if hasattr(item, "callspec") else "other" for item in found)


def test_a_clone_without_changes_has_nothing_new(checkout):
    assert new(checkout[0], "1", "pytest-2") == []


@pytest.mark.parametrize("committed", [True, False])
def test_a_test_with_new_lines_runs_all_its_cases(checkout, committed):
    folder, git = checkout
    path = folder / "tests" / "test_a.py"
    path.write_text(OLD.replace("[1, 2]", "[1, 2, 3]"))
    if committed:
        git("commit", "-am", "more")
    assert new(folder, "1", "3") == ["1", "3"]


@pytest.mark.parametrize("committed", [True, False])
def test_a_case_runs_whose_name_another_file_adds(checkout, committed):
    folder, git = checkout
    (folder / "tests" / "cases.txt").write_text("parametrize newcomer\n")
    if committed:
        git("add", "-A")
        git("commit", "-m", "more")
    assert new(folder, "newcomer-1", "parametrize", "old") == ["newcomer-1"]


def test_without_git_nothing_is_new(checkout, monkeypatch):
    (checkout[0] / "tests" / "test_a.py").write_text(OLD + "\n")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert new(checkout[0], "1") == []
    checkout[1]("branch", "-D", "main")
    assert new(checkout[0], "1") == []
