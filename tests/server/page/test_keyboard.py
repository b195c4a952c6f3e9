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
