"""Take a picture of the page at work: `python -m tools.dev.page_picture [FILE]`.

Starts a server with the demo model, keeps 24 requests of different lengths running or waiting, some
with a shared prefix, and asks two questions in the page's own chat.  Needs Chromium and the
extra `dev`.  Without FILE: docs/images/engine.png, which README shows.
"""

from pathlib import Path

from tests.support.server.kit import serving
from tests.support.server.page_kit import Shown, chromium, chromium_path, load
from tools.lib.frame import parser_of, run_main
from vllm_metal_lite import EngineConfig, MetalLiteError

ROOT = Path(__file__).resolve().parents[2]

# Fewer blocks than the load would like, so that requests wait and cached blocks are used again.
ENGINE = EngineConfig(num_blocks=420, max_num_seqs=16, max_num_batched_tokens=512)
QUESTIONS = (
    "Hi, my name is Ada and I parked my car on level 3.",
    "Please reverse this list: red, green, blue",
    "Where is my car?",
)


def take(path: Path) -> None:
    """Write a PNG of 1600 x 1000 pixels."""
    with serving(engine=ENGINE) as running, chromium() as browser:
        shown = Shown(
            browser,
            running.url,
            viewport={"width": 1600, "height": 1000},
            reduced_motion="no-preference",
        )
        page = shown.page
        *first, last = QUESTIONS
        for i, question in enumerate(first):
            shown.ask(question)
            shown.answered(i + 1)
        with load(running.url):
            page.locator("#requests li").nth(20).wait_for()
            shown.ask(last)
            shown.answered(len(QUESTIONS))
            page.locator("#requests li").nth(12).wait_for()
            page.wait_for_timeout(1500)  # the steps move in
            page.locator("#engine-state").wait_for(state="hidden")  # no long step is under way
            page.screenshot(path=path)
        if shown.complaints:
            raise MetalLiteError("; ".join(shown.complaints))


def main() -> int:
    parser = parser_of(__doc__)
    picture = ROOT / "docs" / "images" / "engine.png"
    parser.add_argument("file", type=Path, nargs="?", default=picture)
    args = parser.parse_args()
    if chromium_path() is None:
        raise MetalLiteError("there is no Chromium or Chrome here")
    args.file.parent.mkdir(parents=True, exist_ok=True)
    take(args.file)
    print(f"{args.file}: {args.file.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    run_main(main)
