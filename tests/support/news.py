"""What a branch adds to the tests, by git: the lines of test files, and the names of cases.

Without git, or without the branch `main`, nothing is new.
"""

import inspect
import re
import subprocess
from collections import defaultdict
from pathlib import Path

# A change of one of these files can add cases to a test elsewhere.
SOURCES = "tests", "tools", "vllm_metal_lite", "metal"
_WORD = re.compile(r"\w{3,}")


class News:
    """The differences between the files of a checkout and the merge base with `main`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lines: dict[Path, list[range]] = defaultdict(list)  # added ones
        added: list[str] = []
        bases = (self._git("merge-base", "HEAD", ref) for ref in ("main", "origin/main"))
        self._base = next(filter(None, map(str.strip, bases)), "")
        if self._base:
            diff = self._git("diff", "-U0", "--no-color", self._base, "--", *SOURCES).splitlines()
            path = root
            for line in diff:
                if line.startswith("+++ "):
                    path = root / line.removeprefix("+++ b/")
                elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
                    start, count = int(found[1]), int(found[2] or 1)
                    self._lines[path].append(range(start, start + count))
                elif line.startswith("+"):
                    added.append(line)
            others = self._git("ls-files", "--others", "--exclude-standard", "--", *SOURCES)
            for name in others.splitlines():
                text = (root / name).read_text(encoding="utf-8", errors="replace")
                self._lines[root / name].append(range(1, len(text.splitlines()) + 1))
                added.append(text)
        self._added = set(_WORD.findall("\n".join(added)))

    def _git(self, *words: str) -> str:
        """What git prints; nothing if it fails."""
        try:
            return subprocess.run(
                ["git", *words], cwd=self._root, capture_output=True, text=True, errors="replace"
            ).stdout
        except OSError:
            return ""

    def has_lines(self, function) -> bool:
        """Whether lines of a function, its decorators included, are new."""
        path = Path(inspect.getsourcefile(function) or "")
        if not self._lines.get(path):
            return False
        lines, start = inspect.getsourcelines(function)
        end = start + len(lines)
        return any(new.start < end and start < new.stop for new in self._lines[path])

    def words(self, names: set[str]) -> set[str]:
        """The words of these names that the files of the merge base do not have."""
        added = {word for name in names for word in _WORD.findall(name)} & self._added
        if not added:
            return set()
        return added - set(_WORD.findall(self._git("grep", "-hI", "", self._base, "--", *SOURCES)))

    def new_among(self, items) -> set:
        """The tests with new lines, and the cases that a new word names."""
        cases = {item: item.callspec.id for item in items if hasattr(item, "callspec")}
        words = self.words(set(cases.values()))
        named = {item for item, case in cases.items() if words & set(_WORD.findall(case))}
        functions = {f for f in {item.function for item in items} if self.has_lines(f)}
        return named | {item for item in items if item.function in functions}
