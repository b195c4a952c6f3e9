"""How the page looks in a real browser, on screens of all sizes."""

import itertools

import pytest
from playwright.sync_api import expect

from tests.support.server.page_kit import USAGE

pytestmark = pytest.mark.long


@pytest.mark.parametrize("width", [1280, 1440])
def test_a_laptop_shows_the_engine_whole(open_page, width):
    view = open_page(viewport={"width": width, "height": 800})
    page = view.page
    assert page.locator("#engine").is_visible() == (width >= 1440)  # at the first visit
    view.answer_with({"content": "a " * 40}, usage=USAGE)
    view.answer_to("hello")
    if width < 1440:
        page.click("#engine-toggle")
    with view.samples():
        expect(page.locator("#requests li").nth(4)).to_be_in_viewport(ratio=1)
        for name in ("#pool", "#legend", "#samples", "#timeline"):
            expect(page.locator(name)).to_be_in_viewport(ratio=1)
        cut = page.locator("#figures dt, #figures dd, .head, .cost").evaluate_all(
            """all => all.filter((e) => e.scrollWidth > e.clientWidth || e.clientHeight > 40)
               .map((e) => e.innerText)"""
        )
        assert not cut
        hint, context = (page.locator(name).bounding_box() for name in ("#hint", "#context"))
        assert context["y"] + context["height"] < hint["y"] + hint["height"] + 5  # on one line


@pytest.mark.parametrize("width", [360, 390])
def test_a_phone_shows_its_buttons_beside_their_titles(open_page, width):
    view = open_page(viewport={"width": width, "height": 844}, opens=False)
    view.name_model(id="mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit")
    view.open()
    for name in ("#settings-open", "#engine-toggle"):
        expect(view.page.locator(name)).to_be_in_viewport(ratio=1)
    view.page.unroute_all()
    view.reload()
    view.page.click("#engine-toggle")

    def assert_beside() -> None:
        title, button = view.page.locator("#requests-title, #samples").evaluate_all(
            "all => all.map((e) => e.getBoundingClientRect().toJSON())"
        )
        assert button["top"] < (title["top"] + title["bottom"]) / 2 < button["bottom"]

    assert_beside()
    with view.samples():
        assert_beside()


@pytest.mark.parametrize("thinking", [True, False, None])
def test_the_thinking_switch_is_shown_where_the_model_has_one(open_page, thinking):
    """A model that is not loaded has the switch too, and so has a conversation that set it."""
    view = open_page(opens=False)
    page = view.page
    view.name_model(thinking=thinking)
    view.open()
    page.click("#settings-open")
    expect(page.locator("#set-temperature")).to_be_visible()
    expect(page.locator("#set-thinking")).to_be_visible(visible=thinking is not False)


def test_each_view_has_one_heading_of_level_one(view, page):
    for path in ("/", "/#engine"):
        view.open(path)
        expect(page.locator("#chat")).to_be_visible(visible=path == "/")
        expect(page.get_by_role("heading", level=1)).to_have_count(1)


def _luminance(colour: str) -> float:
    """The relative luminance of a colour #rrggbb, by WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_each_ground(open_page, scheme):
    page = open_page(color_scheme=scheme).page
    texts, grounds = (
        page.evaluate(
            """names => names.map((name) =>
               getComputedStyle(document.documentElement).getPropertyValue(`--${name}`))""",
            names,
        )
        for names in (["text", "soft"], ["page", "panel", "raised", "hover", "mine"])
    )
    for text, ground in itertools.product(texts, grounds):
        dark, light = sorted([_luminance(text), _luminance(ground)])
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)
    placeholder = "getComputedStyle(document.querySelector('#prompt'), '::placeholder').color"
    soft = "rgb({}, {}, {})".format(*(int(texts[1][i : i + 2], 16) for i in (1, 3, 5)))
    assert page.evaluate(placeholder) == soft


def test_a_touch_screen_shows_the_buttons_that_a_mouse_finds(open_page):
    size = {"width": 1200, "height": 800}
    view = open_page(viewport=size, has_touch=True, is_mobile=True)
    view.answer_with({"content": "Good."})
    view.answer_to("hello")
    for name in ("#conversations .tools", ".message.user .actions"):
        expect(view.page.locator(name)).to_have_css("opacity", "1")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 900, 1600])
def test_nothing_is_wider_than_the_screen(open_page, scheme, width):
    view = open_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = view.page
    view.answer_with({"content": "`" + "long" * 200 + "`\n\n```\n" + "wide " * 200 + "\n```\n"})
    view.answer_to("x" * 500)
    wide = "document.documentElement.scrollWidth > innerWidth"
    assert not page.evaluate(wide)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    if width < 1100:
        page.click("#engine-toggle")
        assert not page.evaluate(wide)
        expect(page.locator("#chat")).to_have_attribute("inert", "")  # the view covers it
        page.click("#engine-close")
        expect(page.locator("#chat")).not_to_have_attribute("inert", "")
    page.locator("#theme").dispatch_event("click")
    other = {"light": "dark", "dark": "light"}[scheme]
    assert page.evaluate("document.documentElement.dataset.theme") == other


def test_controls_have_states(view, page):
    """A mouse, a press and a lock change each control's look; reading files makes Send busy."""
    view.answer_with({"reasoning_content": "hm"}, {"content": "Good."})
    view.answer_to("hello")
    look = """e => { const s = getComputedStyle(e);
      return [s.backgroundColor, s.borderColor, s.color, s.filter, s.opacity].join(); }"""
    # The row of a conversation changes as a whole.
    kinds = "button:enabled:not(.title), select, #search, label.file, summary"
    controls = page.locator(f"#app :is({kinds})").filter(visible=True)
    same = []
    for control in controls.all():
        page.mouse.move(0, 799)
        before = control.evaluate(look)
        control.hover()
        if control.evaluate(look) == before:
            same.append(control.evaluate("e => e.outerHTML"))
    assert not same
    enabled = page.locator("#new").evaluate(look)
    page.locator("#new").evaluate("e => { e.disabled = true; }")
    page.mouse.move(0, 799)
    assert page.locator("#new").evaluate(look) != enabled
    page.evaluate("() => { File.prototype.arrayBuffer = () => new Promise(() => {}); }")
    page.set_input_files("#attach", {"name": "a.md", "mimeType": "", "buffer": b"a"})
    expect(page.locator("#send")).to_have_attribute("aria-busy", "true")
    expect(page.locator("#send")).to_have_css("cursor", "progress")
