"""Write docs/models.md: run every architecture of mlx-lm through the conformance suite."""

import re
from importlib.metadata import version
from pathlib import Path

import tests.conftest  # noqa: F401  (the CPU, before anything imports MLX)
from tests.support.arch_configs import CANNOT_RUN, CONFIGS
from tests.support.conformance import HITS, TOLERANCE, Result, check

ROOT = Path(__file__).resolve().parents[2]

PATH = ROOT / "docs" / "models.md"

_PAGE = Path(__file__).with_name("models_page.md")
_MODES = ("packed", "chunked", "mixed", "preempted")
_COLUMNS = ("architecture", "keeps", "attention", "recurrent", *_MODES)
_COLUMNS += ("engine", "prefix cache", "error")


def render(results: list[Result]) -> str:
    """The page."""
    passed = [r for r in results if r.status in ("passed", "failed")]
    refused = [r for r in results if r.status == "refused"]
    cannot = [r for r in results if r.status == "cannot run"]

    def modules(of: list[Result]) -> int:
        return len({_module(r) for r in of})

    counts = (
        f"{modules(results)} architectures in {len(results)} configurations: {modules(passed)} "
        f"work, {modules(refused)} are refused when they are loaded, mlx-lm itself cannot run "
        f"{modules(cannot)} on the CPU."
    )
    parts = [
        f"| {' | '.join(_COLUMNS)} |",
        "|" + " --- |" * len(_COLUMNS),
        *(row(r) for r in sorted(passed, key=lambda r: r.name.lower())),
        "",
    ]
    # The loader says "... is not supported: why".
    why_refused = {_module(r): r.reason.partition("not supported: ")[2] for r in refused}
    why_off = {r.name: f"{r.no_prefix_cache}." for r in passed if r.no_prefix_cache}
    why_not = {m: CANNOT_RUN.get(m, r.reason) for r in cannot for m in [_module(r)]}
    for title, reasons in (
        ("Without a prefix cache", why_off),
        ("Refused when loaded", why_refused),
        ("What mlx-lm itself cannot run on the CPU", why_not),
    ):
        parts += [f"## {title}", "", "| architecture | why |", "| --- | --- |"]
        parts += [f"| {module} | {why} |" for module, why in sorted(reasons.items())] + [""]
    return _PAGE.read_text(encoding="utf-8").format(
        version=version("mlx-lm"), tolerance=TOLERANCE, counts=counts, tables="\n".join(parts)
    )


def without_errors(page: str) -> str:
    """The page but for its measured numbers."""
    return re.sub(r"\| [0-9.e+-]+ \|$", "| |", page, flags=re.MULTILINE)


def row(r: Result) -> str:
    """The table's row of a configuration that runs."""
    works = {mode for mode, error in r.errors.items() if error < TOLERANCE}
    hits = HITS & set(r.errors)
    prefix = "off" if not hits else "yes" if works >= hits else "no"
    marks = ["yes" if mode in works else "no" for mode in (*_MODES, "engine")]
    cells = [r.name, r.state, r.attention, r.recurrent, *marks, prefix, f"{r.worst:.0e}"]
    return f"| {' | '.join(cells)} |"


def _module(r: Result) -> str:
    return r.name.split("/")[0]


def main() -> None:
    results = []
    for name in CONFIGS:
        results.append(check(name))
        print(f"{results[-1].status:10} {name}")
    PATH.write_text(render(results), encoding="utf-8")


if __name__ == "__main__":
    main()
