"""Fill the Homebrew formula: the address and hash of the source package, and those of each wheel.

    pip install --dry-run --ignore-installed --report report.json --only-binary=:all: \\
      --target unused --platform macosx_14_0_arm64 --python-version 3.13 "WHEEL[serve]" hatchling
    python -m tools.release.formula SDIST report.json --url URL --homepage URL

Run pip on a Mac: it checks the conditions of dependencies for the system that it runs on.
hatchling builds the package from its source.
"""

import json
from hashlib import sha256
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lib.frame import parser_of, run_main
from vllm_metal_lite import MetalLiteError

TEMPLATE = Path(__file__).with_name("vllm-metal-lite.rb.in")
_OWN = "vllm-metal-lite"
_EXTRAS = ("serve", "structured", "images")


def formula(sdist: Path, report: dict, url: str, homepage: str) -> str:
    """The text of the formula.  report: the report that pip wrote.

    Raises MetalLiteError if the report lacks a package that a Mac needs, or the hash of a wheel.
    """
    found = {canonicalize_name(entry["metadata"]["name"]): entry for entry in report["install"]}
    own, resources = found.pop(_OWN), []
    if missing := sorted(_needed(own["metadata"]["requires_dist"]) - {_OWN, *found}):
        raise MetalLiteError(f"the report lacks {', '.join(missing)}: make it on a Mac")
    for name, entry in sorted(found.items()):
        wheel = entry["download_info"]
        digest = wheel.get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest or not wheel["url"].endswith(".whl"):
            raise MetalLiteError(f"{name}: {wheel['url']} is no wheel with a sha256")
        lines = [f'  resource "{name}" do', f'    url "{wheel["url"]}"']
        resources.append("\n".join([*lines, f'    sha256 "{digest}"', "  end"]))
    values = {
        "HOMEPAGE": homepage,
        "URL": url,
        "SHA256": sha256(sdist.read_bytes()).hexdigest(),
        "RESOURCES": "\n\n".join(resources),
    }
    text = TEMPLATE.read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _needed(requirements: list[str]) -> set[str]:
    """The names of the packages that a Mac needs to build this package and to serve."""
    mac, names = {"sys_platform": "darwin"}, {"hatchling"}
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**mac, "extra": extra}) for extra in _EXTRAS):
            names.add(canonicalize_name(requirement.name))
    return names


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--url", required=True, help="the address of the source package")
    parser.add_argument("--homepage", required=True)
    args = parser.parse_args()
    report = json.loads(args.report.read_text())
    print(formula(args.sdist, report, args.url, args.homepage), end="")
    return 0


if __name__ == "__main__":
    run_main(main)
