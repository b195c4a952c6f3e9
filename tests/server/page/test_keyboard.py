"""The page by keyboard, in a real browser: where the focus is, and the use of Escape."""

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.long


@pytest.fixture
def drawer(open_page):
    """The page with its list of conversations as a drawer, while an answer is awaited."""
    view = open_page(viewport={"width": 900, "height": 700})
    view.page.route("**/v1/chat/completions", lambda route: None)  # no answer comes
    view.ask("hello")
    view.page.click("#sidebar-toggle")
    return view.page


def test_fields_and_buttons_have_names(page):
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.locator("#prompt").input_value() == "one\ntwo"
    unnamed = page.locator("button, select, input, textarea").evaluate_all(
        """all => all.filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim()
           || e.labels?.length)).map((e) => e.outerHTML)"""
    )
    assert not unnamed
    expect(page.get_by_role("log")).to_have_attribute("aria-live", "polite")


def test_a_composition_that_ends_sends_nothing(page):
    page.fill("#prompt", "にほん")
    for event in {"isComposing": True}, {"keyCode": 229}:  # as Chromium and Safari tell it
        page.locator("#prompt").evaluate(
            """(field, event) => field.dispatchEvent(
               new KeyboardEvent("keydown", {key: "Enter", bubbles: true, ...event}))""",
            event,
        )
    expect(page.locator(".message")).to_have_count(0)
    page.press("#prompt", "Enter")
    expect(page.locator(".message.user")).to_have_count(1)


def test_escape_closes_the_drawer_and_then_stops_the_answer(drawer):
    toggle = drawer.locator("#sidebar-toggle")
    expect(toggle).to_have_attribute("aria-expanded", "true")
    expect(drawer.locator("#chat")).to_have_attribute("inert", "")  # the drawer covers the chat
    drawer.fill("#search", "hel")
    drawer.keyboard.press("Escape")
    expect(drawer.locator("#search")).to_have_value("")
    drawer.keyboard.press("Escape")
    expect(toggle).to_have_attribute("aria-expanded", "false")
    expect(toggle).to_be_focused()
    expect(drawer.locator(".waiting")).to_be_visible()
    drawer.keyboard.press("Escape")
    expect(drawer.locator(".message .note")).to_have_text("Stopped before the first token.")


def test_a_conversation_of_the_drawer_is_opened(drawer):
    drawer.locator("#conversations .title").press("Enter")
    expect(drawer.locator("#sidebar")).to_be_hidden()
    expect(drawer.locator("#sidebar-toggle")).to_be_focused()


def test_the_list_of_conversations_keeps_the_focus(view, page):
    view.answer_to("hello")
    page.click("#new")
    view.answer_to("hi")
    hello = page.get_by_role("button", name="hello", exact=True)
    hello.press("Enter")
    expect(page.locator(".message.user .text")).to_have_text("hello")
    expect(hello).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.mouse.move(800, 400)
    page.fill("#ask-value", "greeting")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Rename greeting")).to_be_focused()
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("#prompt")).to_be_focused()  # of a new conversation


@pytest.mark.parametrize("path", ["/", "/#engine"])
def test_the_view_of_the_engine_gives_the_focus_back(view, page, path):
    view.open(path)
    if path == "/":
        page.click("#engine-toggle")
    page.locator("#engine-close").press("Enter")
    expect(page.locator("#engine")).to_be_hidden()
    expect(page.locator("#engine-toggle")).to_be_focused()


_REACHABLE = "button, select, textarea, input, summary, a[href], canvas, [tabindex]"
# The page keeps them: news from the engine may add elements meanwhile.
_SEEN = f"""() => (window.seen = [...document.querySelectorAll("{_REACHABLE}")]
  .filter((e) => e.checkVisibility({{ visibilityProperty: true }}) && !e.disabled)
  .filter((e) => !e.closest("[inert]"))
  .filter((e) => !document.querySelector("dialog[open]") || e.closest("dialog"))).length"""
_FOCUSED = """() => {
  const e = document.activeElement;
  const marked = [e, e.closest(".file"), e.closest(".box")].filter(Boolean).some((part) => {
    const style = getComputedStyle(part);
    return style.outlineStyle !== "none" || part.matches(".box");  // whose border changes
  });
  return [window.seen.indexOf(e), marked];
}"""


def walk(page) -> None:
    """Tab through the page: the keyboard reaches each control that is seen, and the focus shows."""
    count, reached = page.evaluate(_SEEN), set()
    assert count > 0
    for _ in range(count + 8):  # some elements are the browser's own
        page.keyboard.press("Tab")
        index, marked = page.evaluate(_FOCUSED)
        if index >= 0:
            assert marked, page.evaluate("document.activeElement.outerHTML")
            reached.add(index)
    missed = """reached => window.seen.filter((e, i) => e.isConnected && !reached.includes(i))
      .map((e) => e.outerHTML)"""
    assert not page.evaluate(missed, sorted(reached))


@pytest.mark.parametrize("width", [390, 1280, 1600])
def test_tab_reaches_everything(open_page, width):
    view = open_page(viewport={"width": width, "height": 900})
    page = view.page
    text = "```c\n1\n```\n\n| a |\n|---|\n| 1 |\n\n[there](https://example.com)"
    view.answer_with({"reasoning_content": "hm"}, {"content": text})
    page.set_input_files("#attach", {"name": "a.md", "mimeType": "", "buffer": b"a"})
    expect(page.locator("#attached li")).to_have_count(1)
    view.answer_to("hello")
    page.set_input_files("#attach", {"name": "b.md", "mimeType": "", "buffer": b"b"})
    expect(page.locator("#attached li")).to_have_count(1)
    walk(page)
    if page.locator("#sidebar-toggle").is_visible():
        page.locator("#sidebar-toggle").press("Enter")
        expect(page.locator("#new")).to_be_focused()
        walk(page)
        page.keyboard.press("Escape")
    page.locator("#settings-open").press("Enter")
    walk(page)
    page.keyboard.press("Escape")
    expect(page.locator("#settings-open")).to_be_focused()
    if width < 1440:
        page.locator("#engine-toggle").press("Enter")
        expect(page.locator("#engine-close")).to_be_focused()
        walk(page)


def test_arrows_point_at_steps_and_blocks(open_page):
    view = open_page(viewport={"width": 1600, "height": 900}, opens=False)
    view.seat(running=30)
    view.open()
    page = view.page
    expect(page.locator("#requests li")).to_have_count(30)
    page.focus("#pool")
    for _ in range(60):
        page.keyboard.press("ArrowUp")
    for _ in range(200):
        page.keyboard.press("ArrowLeft")
    expect(page.locator("#tip")).to_contain_text("Blocks 0 to 39: request 1 alone")
    expect(page.locator("#status")).to_contain_text("request 1 alone")
    expect(page.locator("#requests .dim")).to_have_count(29)
    page.keyboard.press("Shift+Tab")
    expect(page.locator("#tip")).to_be_hidden()
    expect(page.locator("#requests .dim")).to_have_count(0)
