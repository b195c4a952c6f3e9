"""The boxes of the page in a real browser, in each state, on screens of five widths."""

from collections import Counter
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.server.page.test_pictures import DIGIT, NOTES
from tests.support.server.layout import faults, violations
from tests.support.server.page_kit import USAGE, PageView

pytestmark = pytest.mark.long

HEIGHTS = {360: 740, 390: 844, 768: 1024, 1280: 800, 1440: 900}
ANSWER = """It is a 7, see [this](https://example.com) or [that](javascript:x), and $x\\,y$.

```python
print(7)
```

| a | b |
|---|---|
| 1 | 2 |
""" + "\n\n".join(f"Paragraph {i} has words that fill its line to the end." for i in range(30))


@pytest.fixture
def crowd(open_page):
    """Opens the page on a screen of a width, before an engine with 30 running requests."""

    def crowd(width: int) -> PageView:
        touch = {"has_touch": True, "is_mobile": True} if width < 700 else {}
        screen = {"viewport": {"width": width, "height": HEIGHTS[width]}}
        view = open_page(opens=False, **screen, **touch)
        name = "mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit"
        view.name_model(id=name, root=name, input_modalities=["text", "image"], thinking=True)
        view.seat(running=30, waiting=2, models=3)
        view.open()
        return view

    return crowd


def tour(view: PageView) -> Iterator[str]:
    """Show one state of the page after another; yields the name of each."""
    page = view.page
    yield "welcome"
    page.set_input_files("#attach", [DIGIT, {**NOTES, "name": f"{'long-' * 8}name.md"}])
    expect(page.locator("#attached li")).to_have_count(2)
    page.fill("#prompt", "Which digit is this?\nAnd why?")
    yield "attached files"
    view.answer_with({"reasoning_content": "hm"}, {"content": ANSWER}, usage=USAGE)
    page.press("#prompt", "Enter")
    view.answered(1)
    view.set(temperature="0.7", system="You are terse.")
    yield "the end of an answer"
    page.locator("#scroller").evaluate("e => { e.scrollTop = 150; }")
    expect(page.locator("#to-end")).to_be_visible()
    yield "an answer"
    page.get_by_label("Edit and ask again").press("Enter")
    yield "an edit"
    page.keyboard.press("Escape")
    view.import_file("odd.json", [])
    expect(page.locator("#problem")).to_be_visible()
    yield "a problem"
    page.click("#problem-again")
    if page.locator("#sidebar-toggle").is_visible():
        page.click("#sidebar-toggle")
        expect(page.locator("#new")).to_be_focused()
    page.locator("#conversations li").hover()
    yield "the conversations"
    page.keyboard.press("Escape")
    page.click("#settings-open")
    page.fill("#set-schema", '{"type": "object"}')
    yield "the settings"
    page.keyboard.press("Escape")
    if not page.locator("#engine").is_visible():
        page.click("#engine-toggle")
    expect(page.locator("#requests li")).to_have_count(32)
    yield "the engine"
    page.click("#engine-alone")
    expect(page.locator("#chat")).to_be_hidden()
    yield "the engine alone"


@pytest.mark.parametrize("width", HEIGHTS)
def test_nothing_is_cut_covered_or_small(crowd, width):
    view = crowd(width)
    least = 44 if width < 700 else 24
    found = [
        f"{state}: {wrong}" for state in tour(view) for wrong in faults(view.page, least=least)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("width", HEIGHTS)
def test_axe_finds_nothing(crowd, width):
    """In either theme: they alternate, so that each state is seen in both."""
    view = crowd(width)
    if list(HEIGHTS).index(width) % 2:
        view.page.evaluate("switchTheme()")
    found = []
    for state in tour(view):
        found += [f"{state}: {wrong}" for wrong in violations(view.page)]
        view.page.evaluate("switchTheme()")
    assert not found, "\n".join(found)


def tops(page, selector: str) -> list[int]:
    """The upper edges of the visible elements."""
    return page.locator(selector).evaluate_all(
        """all => all.filter((e) => e.checkVisibility())
           .map((e) => Math.round(e.getBoundingClientRect().top))"""
    )


@pytest.mark.parametrize("width", HEIGHTS)
def test_the_engine_is_in_order(crowd, width):
    view = crowd(width)
    page = view.page
    view.open("/#engine")
    expect(page.locator("#requests li")).to_have_count(32)
    rows = Counter(tops(page, "#figures > div"))  # all figures are shown, also that of drafts
    assert rows.total() == 7
    assert min(rows.values()) >= 3
    assert len(set(tops(page, "#engine-models button"))) == 1
    assert page.locator("#engine-title").evaluate(
        "e => e.offsetHeight < 2 * parseFloat(getComputedStyle(e).fontSize)"
    )
    expect(page.locator("#requests-size")).to_have_text("30 running, 2 waiting")
    if width >= 1440:  # beside the other parts, and not below them
        expect(page.locator("#requests li").nth(29)).to_be_in_viewport(ratio=1)


def test_files_in_the_box_do_not_stack(crowd):
    page = crowd(360).page
    page.set_input_files("#attach", [DIGIT, NOTES, {**NOTES, "name": "more-notes.md"}])
    expect(page.locator("#attached li")).to_have_count(3)
    assert len(set(tops(page, "#attached li"))) == 1


@pytest.mark.parametrize("width", [390, 1280, 1440])
def test_the_engine_opens_and_closes_at_one_place(crowd, width):
    page = crowd(width).page
    if page.locator("#engine").is_visible():
        page.click("#engine-close")
    toggle = page.locator("#engine-toggle").bounding_box()
    page.click("#engine-toggle")
    close = page.locator("#engine-close").bounding_box()
    assert toggle["x"] <= close["x"] + close["width"] / 2 <= toggle["x"] + toggle["width"]
    assert toggle["y"] <= close["y"] + close["height"] / 2 <= toggle["y"] + toggle["height"]
    expect(page.locator("#engine-toggle")).to_be_hidden()  # the chat is narrower: it would move
    page.mouse.click(close["x"] + close["width"] / 2, close["y"] + close["height"] / 2)
    assert page.locator("#engine-toggle").bounding_box() == toggle


def test_a_conversation_begins_beside_the_open_engine(crowd):
    view = crowd(1280)
    view.answer_with({"content": "Good."})
    view.answer_to("hello")
    view.page.click("#engine-toggle")
    view.page.get_by_role("button", name="New conversation").click()
    expect(view.page.locator(".message")).to_have_count(0)
    expect(view.page.locator("#prompt")).to_be_focused()


@pytest.mark.parametrize("width", [360, 1280])
def test_a_schema_has_room(crowd, width):
    page = crowd(width).page
    page.click("#settings-open")
    field, form = (page.locator(n).bounding_box() for n in ("#set-schema", "#set-system"))
    assert field["width"] == form["width"]
    assert field["height"] >= 6 * 18
