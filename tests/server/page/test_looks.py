"""How the page looks in a real browser, on screens of all sizes."""

import pytest
from playwright.sync_api import expect

from tests.support.server.page_kit import USAGE

pytestmark = pytest.mark.long


@pytest.mark.parametrize("width", [1280, 1440])
def test_a_laptop_shows_the_engine_whole(show, width):
    shown = show(viewport={"width": width, "height": 800})
    page = shown.page
    assert page.locator("#engine").is_visible() == (width >= 1440)  # at the first visit
    shown.answer_with({"content": "a " * 40}, usage=USAGE)
    shown.answer_to("hello")
    if width < 1440:
        page.click("#engine-toggle")
    expect(page.locator("#legend li")).to_have_count(4)
    with shown.samples():
        expect(page.locator("#requests li").nth(4)).to_be_in_viewport(ratio=1)
        for name in ("#pool", "#legend", "#samples", "#timeline"):
            expect(page.locator(name)).to_be_in_viewport(ratio=1)
        cut = page.locator("#figures dt, #figures dd, .head, .cost").evaluate_all(
            """all => all.filter((e) => e.scrollWidth > e.clientWidth || e.clientHeight > 30)
               .map((e) => e.innerText)"""
        )
        assert not cut
        hint, context = (page.locator(name).bounding_box() for name in ("#hint", "#context"))
        assert context["y"] + context["height"] < hint["y"] + hint["height"] + 5  # on one line


def test_fingers_find_every_button(show):
    shown = show(viewport={"width": 390, "height": 844})
    page = shown.page
    shown.answer_with({"content": "```c\n1\n```"}, usage=USAGE)
    shown.answer_to("hello")
    small = """all => all.filter((e) => e.checkVisibility({visibilityProperty: true}))
      .map((e) => [e.getBoundingClientRect(), e.getAttribute("aria-label") ?? e.innerText])
      .filter(([box]) => box.width < 44 || box.height < 44).map(([box, name]) => name)"""
    assert not page.locator("button, a.quiet, label.quiet, select").evaluate_all(small)
    page.click("#sidebar-toggle")
    assert not page.locator("button, label.quiet, #search").evaluate_all(small)
    page.mouse.click(380, 400)
    page.click("#engine-toggle")
    assert not page.locator("#engine button, #engine a").evaluate_all(small)


def name_model(page, **fields) -> None:
    """Let the page get these fields of its model."""

    def models(route):
        listed = route.fetch().json()
        listed["data"][0] |= fields
        route.fulfill(json=listed)

    page.route("**/v1/models", models)


@pytest.mark.parametrize("width", [360, 390])
def test_a_phone_shows_its_buttons_beside_their_titles(show, width):
    shown = show(viewport={"width": width, "height": 844}, opens=False)
    name_model(shown.page, id="mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit")
    shown.open()
    for name in ("#settings-open", "#engine-toggle"):
        expect(shown.page.locator(name)).to_be_in_viewport(ratio=1)
    shown.page.unroute_all()
    shown.reload()
    shown.page.click("#engine-toggle")

    def assert_beside() -> None:
        title, button = shown.page.locator("#requests-title, #samples").evaluate_all(
            "all => all.map((e) => e.getBoundingClientRect().toJSON())"
        )
        assert button["top"] < (title["top"] + title["bottom"]) / 2 < button["bottom"]

    assert_beside()
    with shown.samples():
        assert_beside()


@pytest.mark.parametrize("thinking", [True, False, None])
def test_the_thinking_switch_is_shown_where_the_model_has_one(show, thinking):
    """A model that is not loaded has the switch too, and so has a conversation that set it."""
    shown = show(opens=False)
    page = shown.page
    name_model(page, thinking=thinking)
    shown.open()
    page.click("#settings-open")
    expect(page.locator("#set-temperature")).to_be_visible()
    expect(page.locator("#set-thinking")).to_be_visible(visible=thinking is not False)


def test_each_view_has_one_heading_of_level_one(shown, page):
    for path in ("/", "/#engine"):
        shown.open(path)
        expect(page.get_by_role("heading", level=1)).to_have_count(1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 900, 1600])
def test_nothing_is_wider_than_the_screen(show, scheme, width):
    shown = show(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = shown.page
    shown.answer_with({"content": "`" + "long" * 200 + "`\n\n```\n" + "wide " * 200 + "\n```\n"})
    shown.answer_to("x" * 500)
    wide = "document.documentElement.scrollWidth > innerWidth"
    assert not page.evaluate(wide)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    if width < 1100:
        page.click("#engine-toggle")
        assert not page.evaluate(wide)
        expect(page.locator("#chat")).to_have_attribute("inert", "")  # the view covers it
        page.click("#engine-close")
        expect(page.locator("#chat")).not_to_have_attribute("inert", "")
    page.evaluate("switchTheme()")
    other = {"light": "dark", "dark": "light"}[scheme]
    assert page.evaluate("document.documentElement.dataset.theme") == other
