"""Write docs/models.md: run every architecture of mlx-lm through the conformance suite.

python -m tools.dev.models_table         some minutes
"""

import textwrap
from importlib.metadata import version
from pathlib import Path

import tests.conftest  # noqa: F401  (the CPU, before anything imports MLX)
from tests.support.models.configs import CANNOT_RUN, CONFIGS
from tests.support.models.conformance import TOLERANCE, Result, check
from tools.lib.frame import parser_of, run_main

PATH = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_PAGE = Path(__file__).with_name("models_page.md")
_INDENT = "  "  # of a list's further lines


def render(results: list[Result]) -> str:
    """The page; a configuration that fails is not on it."""
    passed = [r for r in results if r.status == "passed"]
    refused = [r for r in results if r.status == "refused"]
    cannot = [r for r in results if r.status == "cannot run"]

    def modules(of: list[Result]) -> int:
        return len({_module(r) for r in of})

    counts = (
        f"{modules(results)} architectures in {len(results)} configurations: {modules(passed)} "
        f"work, {modules(refused)} are refused when they are loaded, mlx-lm itself cannot run "
        f"{modules(cannot)} on the CPU."
    )
    lists: dict[str, list[str]] = {}
    for r in sorted(passed, key=lambda r: r.name.lower()):
        lists.setdefault(head(r), []).append(r.name)
    parts = []
    for kind, names in sorted(lists.items(), key=lambda item: (-len(item[1]), item)):
        text = f"- {kind}: {', '.join(names)}"
        parts.append(textwrap.fill(text, 118, subsequent_indent=_INDENT, break_on_hyphens=False))
    parts.append("")
    # The loader says "... is not supported: why".
    why_refused = {_module(r): r.reason.partition("not supported: ")[2] for r in refused}
    why_not = {m: CANNOT_RUN.get(m, r.reason) for r in cannot for m in [_module(r)]}
    for title, reasons in (
        ("Refused when loaded", why_refused),
        ("What mlx-lm itself cannot run on the CPU", why_not),
    ):
        parts += [f"## {title}", "", "| architecture | why |", "| --- | --- |"]
        parts += [f"| {module} | {why} |" for module, why in sorted(reasons.items())] + [""]
    return _PAGE.read_text(encoding="utf-8").format(
        version=version("mlx-lm"), tolerance=TOLERANCE, counts=counts, tables="\n".join(parts)
    )


def head(r: Result) -> str:
    """The head of the list that a configuration belongs to."""
    notes = {
        "attention by segment": r.attention == "by segment",
        "recurrent layers in sequences": r.recurrent == "in sequences",
    }
    return "; ".join([f"**{r.state}**", *(note for note, holds in notes.items() if holds)])


def listed(page: str) -> dict[str, set[str]]:
    """The configurations of each list of the page, by its head."""
    lines = page.replace(f"\n{_INDENT}", " ").splitlines()
    lists = (line.removeprefix("- ").split(": ") for line in lines if line.startswith("- **"))
    return {kind: set(names.split(", ")) for kind, names in lists}


def _module(r: Result) -> str:
    return r.name.split("/")[0]


def main() -> int:
    parser_of(__doc__).parse_args()
    results = []
    for name in CONFIGS:
        results.append(check(name))
        print(f"{results[-1].status:10} {name}")
    PATH.write_text(render(results), encoding="utf-8")
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    run_main(main)
