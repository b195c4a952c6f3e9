"""Take a picture of the page at work: `python -m tools.dev.page_picture [FILE]`.

Starts a server with the demo model, sends the page's samples, some with a shared prefix, and asks
questions in the page's own chat.  Needs Chromium and the extra `dev`.  Without FILE:
docs/images/engine.png, which README shows.
"""

import re
from pathlib import Path

from tests.support.server.kit import serving
from tests.support.server.page_kit import WIDE, PageView, chromium, chromium_path
from tools.lib.frame import parser_of, run_main
from vllm_metal_lite import EngineConfig, MetalLiteError

ROOT = Path(__file__).resolve().parents[2]

# Too few blocks for all samples at once, so that requests wait and cached blocks are reused.
ENGINE = EngineConfig(num_blocks=420, max_num_seqs=16, max_num_batched_tokens=512)
QUESTIONS = (
    "Hi, my name is Ada and I parked my car on level 3.",
    "Please reverse this list: red, green, blue",
    "Where is my car?",
)


def take(path: Path) -> None:
    """Write a PNG of 1600 x 1000 pixels."""
    with serving(engine=ENGINE) as running, chromium() as browser:
        view = PageView(browser.new_context(**WIDE), running.url)
        page = view.page
        *first, last = QUESTIONS
        for i, question in enumerate(first):
            view.ask(question)
            view.answered(i + 1)
        view.ask(last)  # before the samples take all seats
        with view.samples():
            view.answered(len(QUESTIONS))
            page.locator("#requests li", has_text=re.compile(r"[4-9]\d out")).first.wait_for()
            page.locator("#engine-state").wait_for(state="hidden")  # no long step is under way
            page.screenshot(path=path)
        if view.complaints:
            raise MetalLiteError("; ".join(view.complaints))


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
