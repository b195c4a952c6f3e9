"""What is wrong with the boxes of an open page: measured in the browser, without pictures."""

import tarfile
from functools import cache
from pathlib import Path

from playwright.sync_api import Page

_AXE = "4.14.1"

# Boxes are measured as they are seen: cut by all that clips them, and where nothing covers them.
_FAULTS = r"""(least) => {
  const found = [];
  const name = (e) => e.getAttribute("aria-label") || e.id || e.className
    || e.textContent.trim().slice(0, 40);
  const meets = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  const clipped = (box, element) => {
    let { left, right, top, bottom } = box;
    for (let e = element; e && e !== document.body; e = e.parentElement) {
      if (getComputedStyle(e).overflow === "visible") continue;
      const edge = e.getBoundingClientRect();
      [left, top] = [Math.max(left, edge.left), Math.max(top, edge.top)];
      [right, bottom] = [Math.min(right, edge.right), Math.min(bottom, edge.bottom)];
    }
    return { left, right, top, bottom };
  };
  const uncovered = (box, e) => {
    const x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
    const top = document.elementFromPoint(x, y);
    return top && (top === e || e.contains(top) || top.contains(e));
  };
  const seen = (e) => e.checkVisibility({ visibilityProperty: true, opacityProperty: true })
    && !e.closest("[inert], .offscreen, .skip")
    && (!document.querySelector("dialog[open]") || e.closest("dialog"));

  const wide = document.documentElement.scrollWidth - innerWidth;
  if (wide > 0) found.push(`the page is ${wide} px wider than the screen`);

  const kinds = "button, a[href], select, textarea, input, summary, label.file";
  const controls = [...document.querySelectorAll(kinds)]
    .filter((e) => seen(e) && !e.matches(".file input, p a, li a, td a"))
    .map((e) => [e, e.getBoundingClientRect()])
    .map(([e, whole]) => ({ e, whole, box: clipped(whole, e) }))
    .filter(({ e, box }) => box.right > box.left && box.bottom > box.top && uncovered(box, e));
  for (const { e, whole } of controls) {
    if (whole.width < least || whole.height < least) {
      found.push(`${name(e)} is ${Math.round(whole.width)} x ${Math.round(whole.height)} px`);
    }
    // The width of text in a closed <select> or in a placeholder shows only when it is drawn.
    const shown = e.matches("select") ? e.selectedOptions[0]?.text : e.value ? "" : e.placeholder;
    if (shown && getComputedStyle(e).textOverflow !== "ellipsis") {
      const pen = new OffscreenCanvas(1, 1).getContext("2d");
      pen.font = getComputedStyle(e).font;
      const style = getComputedStyle(e);
      const room = e.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      if (pen.measureText(shown).width > room + 1) found.push(`${name(e)} cuts “${shown}”`);
    }
  }
  controls.forEach((a, i) => controls.slice(i + 1).forEach((b) => {
    if (a.e.contains(b.e) || b.e.contains(a.e) || !meets(a.box, b.box)) return;
    found.push(`${name(a.e)} overlaps ${name(b.e)}`);
  }));

  const lines = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    const e = node.parentElement;
    if (!node.data.trim() || !seen(e) || e.closest("option, noscript")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const line of range.getClientRects()) {
      if (!line.width) continue;
      const box = clipped(line, e);
      const gone = box.right <= box.left || box.bottom <= box.top;  // scrolled away
      const scrolls = (axis) => {
        for (let p = e; p; p = p.parentElement) {
          const side = axis === "X" ? "Width" : "Height";
          const larger = p[`scroll${side}`] > p[`client${side}`];
          if (larger && getComputedStyle(p)[`overflow${axis}`] === "auto") return true;
        }
        return false;
      };
      const named = e.closest("[title]");  // a tooltip tells the whole
      const cut = gone ? !scrolls("Y") : line.right > box.right + 1 || line.left < box.left - 1;
      if (cut && !named && !scrolls("X")) found.push(`“${node.data.trim()}” is cut`);
      if (gone || !uncovered(box, e)) continue;
      lines.push({ e, box, words: node.data.trim().slice(0, 40) });
      for (const control of controls) {
        if (!control.e.contains(e) && !e.contains(control.e) && meets(box, control.box)) {
          found.push(`${name(control.e)} covers “${node.data.trim().slice(0, 40)}”`);
        }
      }
    }
  }
  lines.forEach((a, i) => lines.slice(i + 1).forEach((b) => {
    if (a.e.contains(b.e) || b.e.contains(a.e) || !meets(a.box, b.box)) return;
    found.push(`“${a.words}” overlaps “${b.words}”`);
  }));
  return [...new Set(found)];
}"""


def faults(page: Page, *, least: int) -> list[str]:
    """The faults of what is shown: a page that is too wide, text that is cut, controls and texts
    that overlap, and controls whose sides are below `least` px."""
    return page.evaluate(_FAULTS, least)


@cache
def _axe() -> str:
    """The source of axe-core; skips the test if npm cannot get it."""
    from tests.support.chat.real_parts import fetched

    def unpack(archive: Path, folder: Path) -> None:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")

    folder = fetched(f"axe-core-{_AXE}", ["npm", "pack", "--silent", f"axe-core@{_AXE}"], unpack)
    return (folder / "package/axe.min.js").read_text("utf-8")


def violations(page: Page) -> list[str]:
    """What axe-core finds in the page as it is: rules, and the elements that break them."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_axe() + ";0")  # not as a <script>, which the page's policy refuses
    return page.evaluate(
        """async () => (await axe.run({resultTypes: ["violations"]})).violations
           .flatMap(({id, nodes}) => nodes.map((n) => `${id}: ${n.target} ${n.failureSummary}`))"""
    )
