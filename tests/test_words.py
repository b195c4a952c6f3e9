"""Each word has one meaning: docs/architecture.md, "Words", as far as a script can see.

To allow a name in another folder, give it there the meaning of the table.
"""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = "vllm_metal_lite", "tools", "tests", "docs", "README.md", "CONTRIBUTING.md", "SECURITY.md"

# Phrase in a comment, a docstring, a message or a page: what to write instead.
PHRASES = {
    r"of which": "name the noun: 'whose', 'these', a new sentence",
    r"so many": "'this number of', or the parameter's name",
    r"(go|goes|going|went) on": "continue",
    r"(take|takes|took) along": "include",
    r"(give|gives|gave) way": "be preempted, be replaced",
    r"(stand|stands|stood) for": "represent, mean",
    r"in the place of": "instead of, replaces",
    r"for nothing": "wasted",
    r"next best": "fallback",
    r"a (scheduled|running) request has a row": "seat",
}
# Name in the package: the folders and files where it has its meaning, and the word for others.
_PLANS = "attention kernels recurrence checks fusion/tune engine/scoring engine/llm runner"
_RANKS = "distributed links model runner fusion kernels vllm_plugin sampling engine server outputs"
_RANKS += " prefix_disk/namespace assembly images/eyes"
_GROUPS = "attention batch kv scheduler vllm_plugin distributed model kernels checks cli"
_GROUPS += " recurrence runner engine prefix_disk assembly"
NAMES = {
    r"plans?|\w+_plans?|\w*Plan": (f"{_PLANS} server/openai_api/pooling", "the thing that it is"),
    r"ranks?|_ranks?": (_RANKS, "priority, order"),
    r"groups?|_groups": (f"{_GROUPS} specs chat_formats/tagged", "batch, part, kind"),
    r"forms?|with_form|check_form|answer_form": ("server structured_outputs", "format, kind"),
    r"ways?|trails?|instead|without_kernels?": ("", "path, trial, fallback"),
    r"attention_chunk": ("attention kernels kv model scheduler specs", "chunk"),
}
# A line of code: the word to use.
LINES = {r"\brow = \S*\.req_index\b|\breq_index = row\b": "seat"}


def findings(path: str, text: str) -> list[str]:
    """What is wrong in a file.  path: relative to the repository."""
    if not path.endswith(".py"):
        return _phrases(path, 1, text)
    found, in_tests = [], path.startswith("tests/")
    room = path.removeprefix("vllm_metal_lite/")
    names = {
        name: better
        for name, (allowed, better) in NAMES.items()
        # Tests must avoid the names that no folder may use.  Tools may use all names.
        if (room != path or (in_tests and not allowed))
        and not room.startswith(tuple(allowed.split()))
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind, word = tokenize.tok_name[token.type], token.string
        # Other strings of tests are prompts and answers.
        prose = kind == "STRING" or kind.startswith("FSTRING_M")
        if kind == "COMMENT" or (prose and (not in_tests or '"""' in word)):
            found += _phrases(path, token.start[0], word)
        if kind == "NAME":
            wrong = [better for name, better in names.items() if re.fullmatch(name, word)]
            found += [f"{path}:{token.start[0]}: name `{word}`: {better}" for better in wrong]
    for number, line in enumerate(text.splitlines(), 1):
        wrong = [better for code, better in LINES.items() if re.search(code, line)]
        found += [f"{path}:{number}: {line.strip()}: {better}" for better in wrong]
    return found


def _phrases(path: str, first: int, text: str) -> list[str]:
    found = []
    for phrase, better in PHRASES.items():
        wrapped = phrase.replace(" ", r"[\s#]+")
        for match in re.finditer(rf"\b{wrapped}\b", text, re.IGNORECASE):
            number = first + text.count("\n", 0, match.start())
            found.append(f"{path}:{number}: {match[0]!r}: {better}")
    return found


def test_words_have_their_meaning():
    found = []
    for room in ROOMS:
        files = [ROOT / room] if (ROOT / room).is_file() else sorted((ROOT / room).rglob("*"))
        for file in files:
            path = str(file.relative_to(ROOT))
            if file.suffix in (".py", ".md") and path != "tests/test_words.py":
                found += findings(path, file.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("docs/a.md", "Rows, of which\ntwo are padding.", "docs/a.md:1: 'of which\\ntwo'"[:-6]),
        ("tools/a.py", "# It goes on.\n", "'goes on': continue"),
        ("tests/a.py", 'def f():\n    """A row stands for it."""\n', "a.py:2: 'stands for'"),
        ("tests/a.py", "way = 1\n", "name `way`"),
        ("vllm_metal_lite/a.py", 'raise E(f"{n} so many")\n', "'so many'"),
        ("vllm_metal_lite/kv/a.py", "plan = 1\n", "name `plan`"),
        ("vllm_metal_lite/scheduler/a.py", "x.rank = 1\n", "priority"),
        ("vllm_metal_lite/engine/a.py", "row = request.req_index\n", "seat"),
    ],
)
def test_a_wrong_word_is_found(path, text, expected):
    """The negative control: one finding for each seeded example."""
    [found] = findings(path, text)
    assert expected in found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("tests/a.py", 'ask("Go on.")\n'),
        ("vllm_metal_lite/kernels/a.py", "plan, rank, group = 1, 2, 3\n"),
        ("tools/a.py", "ways = 1\n"),
    ],
)
def test_a_right_word_is_not_found(path, text):
    assert findings(path, text) == []
