"""Conversations in a real browser: kept, shared by tabs, deleted, imported."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.support.server.page_kit import until_idle

pytestmark = pytest.mark.long


def test_a_conversation_deleted_during_its_answer_stays_deleted(shown, page, running):
    shown.change_requests("chat/completions", ignore_eos=True, temperature=1)
    shown.ask("tell me a story")
    expect(shown.text).not_to_be_empty()
    shown.delete("tell me a story")
    until_idle(running, page)
    expect(page.locator("#conversations li")).to_have_count(0)
    shown.reload()
    expect(page.locator("#conversations li")).to_have_count(0)
    page.unroute_all()


def test_conversations_stay_over_a_reload(shown, page):
    first = shown.answer_to("hello")
    page.click("#new")
    shown.answer_to("Please reverse this list: red, green, blue")
    shown.reload()
    expect(shown.titles).to_have_text(["Please reverse this list: red, green, blue", "hello"])
    expect(shown.text).to_have_text("blue, green, red")
    page.fill("#search", "GREEN reverse")  # words of a message
    expect(shown.titles).to_have_count(1)
    page.fill("#search", "nowhere")
    expect(page.locator("#no-match")).to_have_text("No conversation contains “nowhere”.")
    page.fill("#search", "")
    shown.titles.last.click()
    expect(shown.text).to_have_text(first)
    page.locator("#conversations li").last.hover()
    page.get_by_label("Rename hello").click()
    page.fill("#ask-value", "greeting")
    page.keyboard.press("Enter")
    expect(shown.titles.last).to_have_text("greeting")
    with page.expect_download() as download:
        page.click("#export")
    saved = json.loads(download.value.path().read_text("utf-8"))
    assert [c["title"] for c in saved] == ["Please reverse this list: red, green, blue", "greeting"]
    shown.delete("greeting")
    expect(shown.titles).to_have_count(1)
    page.set_input_files("#import", download.value.path())
    expect(shown.titles).to_have_count(3)


def test_a_failed_save_is_reported(shown, page):
    page.evaluate(
        "(() => { const s = IDBObjectStore.prototype; [s.old, s.put] = [s.put, s.add]; })()"
    )
    assert shown.answer_to("hello")
    expect(page.locator("#problem-text")).to_have_text(
        "The browser could not save “hello” (Key already exists in the object store.). "
        "Export or delete conversations, then try again."
    )
    page.set_input_files("#attach", {"name": "a.md", "mimeType": "", "buffer": b"a"})
    expect(page.locator("#attached li")).to_have_count(1)
    expect(page.locator("#problem")).to_be_visible()
    page.evaluate("() => { IDBObjectStore.prototype.put = IDBObjectStore.prototype.old; }")
    shown.answer_to("again")
    expect(page.locator("#problem")).to_be_hidden()


def test_conversations_that_cannot_be_read_are_reported(shown, page):
    page.add_init_script("IDBObjectStore.prototype.getAll = () => { throw new Error('x'); }")
    shown.reload()
    expect(page.locator("#model option")).to_have_count(1)
    expect(page.locator("#problem-text")).to_have_text("The conversations could not be read: x")


def test_two_tabs_know_of_each_other(shown, page):
    shown.answer_to("hello")
    other = shown.new_tab()
    other.page.click("#new")
    other.ask("Please reverse this list: red, green, blue")
    expect(shown.titles).to_have_text(["Please reverse this list: red, green, blue", "hello"])
    expect(page.locator(".message.user .text")).to_have_text("hello")


def test_two_tabs_change_one_conversation_during_an_answer(shown, page):
    asked = []
    page.route("**/v1/chat/completions", lambda route: asked.append(route))  # answered later
    shown.ask("first")
    expect(page.locator(".waiting")).to_be_visible()
    other = shown.new_tab()
    expect(other.page.locator(".waiting")).to_be_visible()
    other.answer_with({"content": "the second answer"})
    other.ask("second")
    texts = ["first", re.compile("tiny demo model"), "second", "the second answer"]
    expect(other.text.last).to_have_text(texts[3])
    page.get_by_label("Edit and ask again").first.click()
    page.get_by_label("Edit your message").fill("an edit")
    other.page.locator("#conversations li").hover()
    other.page.get_by_label("Rename first").click()
    other.page.fill("#ask-value", "named")
    asked[0].continue_()
    expect(other.text.first).to_have_text(texts[1])
    other.page.keyboard.press("Enter")
    expect(shown.titles).to_have_text(["named"])
    expect(page.get_by_label("Edit your message")).to_be_focused()
    for tab in shown, other:
        for _ in range(2):
            expect(tab.page.locator(".message .text")).to_have_text(texts)
            tab.reload()


def test_a_conversation_that_another_tab_deletes_stays_deleted(shown, page):
    shown.answer_to("hello")
    shown.new_tab().delete("hello")
    expect(page.locator("#conversations li")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    shown.answer_to("hi")
    shown.reload()
    expect(shown.titles).to_have_text(["hi"])


_MESSAGE = {"id": "a", "role": "user", "content": "hello"}
_LOOP = [_MESSAGE | {"parent": "b"}, _MESSAGE | {"id": "b", "parent": "a"}]
_ODD = {
    "title": [None],
    "system": [5],
    "updated": ["today", None],
    "model": [5],
    "sampling": [None, 5, [], {"stop": "x"}],
    "messages": [
        5,
        [_MESSAGE | {"role": "tool"}],
        [_MESSAGE | {"files": {}}],
        [_MESSAGE | {"role": "assistant"}],  # an answer to nothing
        _LOOP,  # a conversation without a first message
        [_MESSAGE, *_LOOP],  # one with two of the same id
    ],
    "leaf": [5, "b"],
}


def test_a_file_with_an_odd_field_is_not_imported(shown, page):
    for field, value in [(field, value) for field, values in _ODD.items() for value in values]:
        conversation = {"title": "x", "messages": [], field: value}
        shown.import_file("odd.json", [conversation])
        expect(page.locator("#problem-text")).to_have_text(
            f"odd.json is not an export of this page: its “{field}” is not valid."
        )
        page.click("#problem-again")
    shown.import_file("none.json", [])
    expect(page.locator("#problem-text")).to_have_text("none.json contains no conversations.")
    expect(page.locator("#conversations li")).to_have_count(0)


def test_a_file_with_a_title_and_messages_is_enough(shown, page):
    old = {"title": "old", "messages": []}
    shown.import_file("short.json", [old, {"title": "new", "messages": [], "updated": 10**15}])
    expect(shown.titles).to_have_text(["new", "old"])
    page.get_by_text("old").click()
    shown.reload()
