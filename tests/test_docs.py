"""Documents and workflows: commands parse, links lead somewhere, one description of the project."""

import argparse
import ast
import importlib
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import vllm_metal_lite
from vllm_metal_lite import __version__, envs
from vllm_metal_lite.chat_formats.detect import FORMATS
from vllm_metal_lite.cli.commands import make_parser
from vllm_metal_lite.cli.options import UsageError, flag
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.rules import flags_of, rules_of
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.server.params import SamplingFields, ScheduledBody

ROOT = Path(__file__).parent.parent
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "metal/host/README.md"))
FILES = [
    path
    for name in ("vllm_metal_lite", "metal", "tests", "tools", "docs", ".ci")
    for path in (ROOT / name).rglob("*")
] + [*ROOT.glob("*")]
# Pages name files of users, of models and of other projects too.
FOREIGN = {"settings.json", "opencode.json", "doctor.json", "metal/NAME.metal", "modules.json"}
FOREIGN |= {"config_sentence_transformers.json", "1_Pooling/config.json"}
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
SCRIPTS = [ROOT / ".ci/run", ROOT / "tools/test"]
TOOLS = [
    file for file in sorted(ROOT.rglob("tools/**/*.py")) if "run_main(main)" in file.read_text()
]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^(?: {4,}\S.*\n)+", re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_COMMANDS = ("chat", "serve", "launch", "generate", "bench", "models", "cache", "doctor")
_OURS = re.compile(
    r"vllm-metal-lite |tools/\w|\.ci/|(\S*/)?python3? (-m )?\S*tools\b|\.venv/"
    rf"|({'|'.join(_COMMANDS)}) .*--\w"
)
_VARIABLE = re.compile(r'(?:export )?(\w+)="([^"]*)"$')
_FILE = re.compile(r"`([\w./-]+\.(?:py|h|metal|cpp|json|sh|txt|md))`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Parsed(Exception):
    """A command line that its parser accepts."""


def shell_lines(text: str) -> Iterator[str]:
    """The commands of a shell text, with its variables put in."""
    variables: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        if found := _VARIABLE.match(line):
            variables[found[1]] = found[2]
        for name, value in variables.items():
            line = line.replace(f"${name} ", f"{value} ")
        yield line


def commands_in(line: str) -> Iterator[list[str]]:
    """The words of each command of a line; none if the line is prose."""
    line = re.sub(r"\$\{\{.*?\}\}|\$\(.*?\)", "X", line).replace("2>", ">")
    words = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    words.whitespace_split = True
    command: list[str] = []
    try:
        for word in [*words, ";"]:
            if set(word) <= set("|&;<>"):
                yield command
                command = []
            elif command or not re.match(r"[A-Z_]+=", word):  # not a variable for the command
                command.append(word)
    except ValueError:  # an apostrophe: prose
        return


def page_commands(page: Path) -> set[str]:
    """The commands that a page, or the header of a tool, shows."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    found = set()
    for language, block in _FENCE.findall(text):
        if language in ("", "sh"):
            found.update(shell_lines(block))
    text = _FENCE.sub("", text)
    for block in _INDENTED.findall(text):
        found.update(shell_lines(block))
    found.update(" ".join(span.split()) for span in _SPAN.findall(text))
    return {line for line in found if _OURS.match(re.sub(r"^([A-Z_]+=\S+ |\. )*", "", line))}


def workflow_commands(file: Path) -> set[str]:
    jobs = yaml.safe_load(file.read_text())["jobs"].values()
    steps = [step for job in jobs for step in job.get("steps", ())]
    return {line for step in steps for line in shell_lines(step.get("run", "")) if line}


def check(words: list[str]) -> None:
    """Fail if a command of this project names a file, a tool or a flag that does not exist."""
    words = [word.strip("[]") for word in words if word != "..."]
    if words and words[0] == ".ci/reported":
        words = words[2:]
    if not words:
        return
    program = words[0].removeprefix("./")
    if program.startswith(("tools/", ".ci/")):
        assert (ROOT / program).exists(), program
        assert os.access(ROOT / program, os.X_OK) or not words[1:], f"{program} is not executable"
    for word in words:
        if word.startswith(("tests/", "docs/")):
            assert (ROOT / word.split("::")[0]).exists(), word
    if Path(program).name == "vllm-metal-lite" and words[1:] and words[1] != __version__:
        parse_cli(words[1:])
    elif program in (*_COMMANDS, "tools/chat", "tools/serve"):
        parse_cli([Path(program).name, *words[1:]])
    elif Path(program).name.startswith("python") and words[1:2] == ["-m"]:
        if words[2].startswith("tools"):
            parse_tool(words[2], words[3:])
    elif Path(program).name.startswith("python") and words[1:] and words[1].startswith("tools/"):
        parse_tool(words[1].removesuffix(".py").replace("/", "."), words[2:])


def parse_cli(words: list[str]) -> None:
    try:
        make_parser().parse_args(words)
    except UsageError as e:
        pytest.fail(f"{words}: {e}")
    except SystemExit as e:  # --help
        if e.code:
            pytest.fail(f"{words}: exit code {e.code}")


def parse_tool(name: str, words: list[str]) -> None:
    """Parse a tool's command line with the parser that its `main` makes, and run nothing."""
    with pytest.MonkeyPatch.context() as patch:
        parse = argparse.ArgumentParser.parse_args

        def parse_args(self, args=None, namespace=None):
            raise Parsed(parse(self, words))

        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        module = importlib.import_module(name)
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{name}.__main__")
        source = Path(module.__file__).read_text(encoding="utf-8")
        if "parse_args" in source:
            with pytest.raises(Parsed):
                module.main()
        else:
            assert not [word for word in words if word.startswith("-")], "it has no flags"


@pytest.mark.parametrize("page", [*PAGES, *TOOLS], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_parse(page):
    if page.name == "notes.md":
        return  # commands that were there once
    for line in sorted(page_commands(page)):
        for words in commands_in(line.split("  ")[0]):
            check(words)


@pytest.mark.parametrize("file", [*WORKFLOWS, *SCRIPTS], ids=lambda file: file.name)
def test_the_commands_of_a_workflow_parse(file):
    is_workflow = file.suffix == ".yml"
    lines = workflow_commands(file) if is_workflow else set(shell_lines(file.read_text()))
    for line in sorted(lines):
        for words in commands_in(line):
            check(words)


def test_a_page_names_every_tool():
    named = {word for page in PAGES for line in page_commands(page) for word in line.split()}
    for tool in TOOLS:
        path = tool.relative_to(ROOT).with_suffix("")
        module = ".".join(path.parts).removesuffix(".__main__")
        assert {module, f"{path}.py"} & named, tool


@pytest.mark.parametrize(
    "words", [["tools/chat", "--no-such-flag"], ["tools/gone"], ["tests/gone.py"]]
)
def test_a_wrong_command_is_noticed(words):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(words)


def test_commands_are_found():
    """Pages write commands in several ways; a page that changes its way must not hide them."""
    found = {line for page in PAGES for line in page_commands(page)}
    assert len(found) > 80
    for line in (
        "tools/test --quick",
        "python -m tools.bench.server --model qwen3-0.6b --repeats 3",
    ):
        assert any(line in one for one in found), line


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings of a page."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_and_links_of_a_page_exist(page):
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    named = set(_FILE.findall(text)) if page.name != "notes.md" else set()
    for name in named - FOREIGN:
        assert any(file.as_posix().endswith(f"/{name}") for file in FILES), name
    for link in _LINK.findall(text):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


# Lists of the documents, and the code's


def between(page: str, start: str, end: str) -> str:
    """The text of a page of docs/ from `start` to the next `end`."""
    _, found, after = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(start)
    assert found, f"{page} has no {start!r}"
    return after.partition(end)[0]


def first_cells(page: str, start: str, pattern: str) -> set[str]:
    """The matches in the first cells of the table after `start`."""
    table = between(page, start, "|\n\n")
    rows = re.findall(r"^\|(.*?)\|", table, re.MULTILINE)
    return {found for row in rows for found in re.findall(pattern, row)}


def test_every_option_of_the_engine_has_its_flag_and_its_row():
    options = set(rules_of(EngineConfig))
    assert first_cells("configuration.md", "## Engine options", r"`(\w+)`") == options
    for command in ("chat", "serve"):
        assert options <= vars(make_parser().parse_args([command])).keys()


def test_a_sampling_parameter_has_a_flag_or_is_named_here():
    without = {"n", "logprobs", "prompt_logprobs", "thinking", "logit_bias", "allowed_token_ids"}
    without |= {"bad_words", "stop_token_ids", "min_tokens", "ignore_eos", "skip_special_tokens"}
    without |= {"include_stop_str_in_output"}
    flags = vars(make_parser().parse_args(["generate", "-"])).keys() - {"seed"}
    names = {field.replace("sample_seed", "seed") for field in flags}
    assert rules_of(SamplingParams).keys() - names == without


def test_every_flag_of_serve_has_its_row():
    own = vars(make_parser().parse_args(["serve"])).keys() - rules_of(EngineConfig).keys()
    flags = {flag(field) for field in own - {"command", "model"}}
    assert first_cells("configuration.md", "## Server options", r"--[a-z][a-z-]+") == flags


def test_every_environment_variable_has_its_row():
    source = Path(envs.__file__).read_text(encoding="utf-8")
    read = set(re.findall(r'environ.get\("(\w+)"', source))
    names = first_cells("configuration.md", "## Environment variables", r"`(\w+)(?:=\w+)?`")
    assert names == read


def test_every_sampling_parameter_is_named():
    text = between("server.md", "**Sampling.**", ".  If a")
    fields = SamplingFields.model_fields.keys() - ScheduledBody.model_fields.keys() - {"stream"}
    assert set(re.findall(r"`(\w+)`", text)) - {"SamplingParams"} == fields
    text = between("configuration.md", "- Otherwise `", "come from")
    assert set(re.findall(r"(\w+)`", text)) == flags_of(SamplingParams).keys()


def test_each_table_of_the_benchmarks_names_its_receipt():
    """The text after it links to a log or a record of the day, or says that none was kept."""
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    linked = set(re.findall(r"\]\(receipts/([^)]+)\)", pages))
    assert linked == {file.name for file in (ROOT / "docs/receipts").iterdir()}
    blocks = re.split(r"^(?:## .*|(?:\|.*\n)+)", text, flags=re.MULTILINE)
    tables = re.findall(r"^(## .*|(?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert len(tables) == len(blocks) - 1
    for table, after in zip(tables, blocks[1:], strict=True):
        if table.startswith("|"):
            assert "](receipts/" in after or "**No log kept" in after, table
            assert re.search(r"20\d\d-\d\d-\d\d", after), table
            assert re.search(r"\b[0-9a-f]{7,8}\b", after), table


def test_the_page_of_tools_lists_each_format():
    text = (ROOT / "docs/tools.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    assert sorted(name for row in rows for name in _SPAN.findall(row)) == sorted(FORMATS)


def test_the_project_is_described_in_one_way():
    sentence = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    readme = re.sub(r"\[(.*?)\]\(\S+?\)", r"\1", (ROOT / "README.md").read_text(encoding="utf-8"))
    for text in (readme, str(vllm_metal_lite.__doc__), str(make_parser().description)):
        assert sentence in " ".join(text.split())


def test_pull_requests_run_the_tests_once():
    """A branch with a pull request is not tested as a branch, too."""
    for file in WORKFLOWS:
        triggers = yaml.safe_load(file.read_text())[True]  # YAML's `on`
        if "pull_request" in triggers:
            assert triggers["push"] == {"branches": ["main"]}
