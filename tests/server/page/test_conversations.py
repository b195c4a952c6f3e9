"""Conversations in a real browser: kept, shared by tabs, deleted, imported."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.support.server.page_kit import until_idle

pytestmark = pytest.mark.long


def test_a_conversation_deleted_during_its_answer_stays_deleted(view, page, running):
    view.change_requests("chat/completions", ignore_eos=True, temperature=1)
    view.ask("tell me a story")
    expect(view.text).not_to_be_empty()
    view.delete("tell me a story")
    until_idle(running, page)
    expect(page.locator("#conversations li")).to_have_count(0)
    view.reload()
    expect(page.locator("#conversations li")).to_have_count(0)
    page.unroute_all()


def test_conversations_stay_over_a_reload(view, page):
    first = view.answer_to("hello")
    page.click("#new")
    view.answer_to("Please reverse this list: red, green, blue")
    view.reload()
    expect(view.titles).to_have_text(["Please reverse this list: red, green, blue", "hello"])
    expect(view.text).to_have_text("blue, green, red")
    page.fill("#search", "GREEN reverse")  # words of a message
    expect(view.titles).to_have_count(1)
    page.fill("#search", "nowhere")
    expect(page.locator("#no-match")).to_have_text("No conversation contains “nowhere”.")
    page.fill("#search", "")
    view.titles.last.click()
    expect(view.text).to_have_text(first)
    page.locator("#conversations li").last.hover()
    page.get_by_label("Rename hello").click()
    page.fill("#ask-value", "greeting")
    page.keyboard.press("Enter")
    expect(view.titles.last).to_have_text("greeting")
    with page.expect_download() as download:
        page.click("#export")
    saved = json.loads(download.value.path().read_text("utf-8"))
    assert [c["title"] for c in saved] == ["Please reverse this list: red, green, blue", "greeting"]
    view.delete("greeting")
    expect(view.titles).to_have_count(1)
    page.set_input_files("#import", download.value.path())
    expect(view.titles).to_have_count(3)


def break_puts(page, of: str) -> None:
    """Let the browser refuse to store conversations with this title."""
    page.evaluate(
        """(title) => {
          const stores = IDBObjectStore.prototype;
          stores.old = stores.put;
          stores.put = function (conversation) {
            this.old(conversation);
            if (conversation.title === title) this.add(conversation);  // a second of the same key
          };
        }""",
        of,
    )


def test_a_failed_save_or_deletion_is_reported(view, page):
    break_puts(page, of="hello")
    assert view.answer_to("hello")
    expect(page.locator("#problem-text")).to_have_text(
        "The browser could not save “hello” (Key already exists in the object store.). "
        "Export or delete conversations, then try again."
    )
    page.set_input_files("#attach", {"name": "a.md", "mimeType": "", "buffer": b"a"})
    expect(page.locator("#attached li")).to_have_count(1)
    expect(page.locator("#problem")).to_be_visible()
    view.new_tab().answer_to("hi")
    expect(view.titles).to_have_text(["hi", "hello"])
    expect(page.locator(".message.user .text")).to_have_text("hello")
    page.evaluate("() => { IDBObjectStore.prototype.put = IDBObjectStore.prototype.old; }")
    page.click("#problem-again")
    expect(page.locator("#problem")).to_be_hidden()
    page.evaluate("() => { IDBObjectStore.prototype.delete = () => { throw new Error('x'); }; }")
    view.delete("hello")
    expect(page.locator("#problem-text")).to_have_text("“hello” could not be deleted: x")
    expect(view.titles).to_have_count(2)
    view.reload()
    expect(view.titles).to_have_text(["hi", "hello"])


def test_conversations_that_cannot_be_read_are_reported(view, page):
    page.add_init_script("IDBObjectStore.prototype.getAll = () => { throw new Error('x'); }")
    view.reload()
    expect(page.locator("#model option")).to_have_count(1)
    expect(page.locator("#problem-text")).to_have_text("The conversations could not be read: x")


def test_two_tabs_change_one_conversation_during_an_answer(view, page):
    asked = []
    page.route("**/v1/chat/completions", lambda route: asked.append(route))  # answered later
    view.ask("first")
    expect(page.locator(".waiting")).to_be_visible()
    other = view.new_tab()
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
    other.page.evaluate(  # the name comes while the tab reads the conversation again
        """() => {
          const id = document.querySelector("#conversations .title").id.replace("open-", "");
          for (let i = 0; i < 50; i++) new BroadcastChannel("vllm-metal-lite").postMessage(id);
          setTimeout(() => document.querySelector("#ask [value=ok]").click(), 3);
        }"""
    )
    expect(view.titles).to_have_text(["named"])
    expect(other.titles).to_have_text(["named"])
    expect(page.get_by_label("Edit your message")).to_be_focused()
    for tab in view, other:
        for _ in range(2):
            expect(tab.page.locator(".message .text")).to_have_text(texts)
            tab.reload()


def test_tabs_without_locks_lose_no_answer(view, page):
    page.add_init_script("Object.defineProperty(navigator, 'locks', {value: undefined});")
    view.reload()  # as over plain HTTP from another machine
    asked = []
    page.route("**/v1/chat/completions", lambda route: asked.append(route))  # answered later
    view.ask("first")
    expect(page.locator(".waiting")).to_be_visible()
    other = view.new_tab().page
    other.locator("#conversations li").hover()
    other.get_by_label("Rename first").click()
    other.fill("#ask-value", "named")
    other.keyboard.press("Enter")
    expect(view.titles).to_have_text(["named"])
    asked[0].continue_()
    assert "tiny demo model" in view.answered(1)
    view.reload()
    expect(view.text).to_contain_text("tiny demo model")


def test_an_answer_stops_with_the_tab_that_receives_it(view, page):
    view.change_requests("chat/completions", ignore_eos=True, temperature=1)
    view.ask("tell me a story")
    expect(view.text).not_to_be_empty()
    others = [view.new_tab(), view.new_tab()]
    for other in others:
        expect(other.page.locator("[aria-busy=true]")).to_have_count(1)
    page.close()
    for other in others:
        expect(other.page.locator(".cost")).to_contain_text("stopped")
        expect(other.text).not_to_be_empty()


def test_a_file_is_imported_whole_or_not_at_all(view, page):
    break_puts(page, of="bad")
    titles = ["good", "bad", "good too"]
    view.import_file("three.json", [{"title": title, "messages": []} for title in titles])
    expect(page.locator("#problem-text")).to_contain_text("could not save 3 conversations")
    expect(view.titles).to_have_count(0)
    view.reload()
    expect(view.titles).to_have_count(0)


def test_a_browser_that_keeps_nothing(open_page):
    view = open_page(opens=False)
    view.page.add_init_script(
        """for (const name of ["sessionStorage", "localStorage", "indexedDB"]) {
             Object.defineProperty(window, name, {get() { throw new DOMException("blocked"); }}); }
           navigator.locks.request = () => Promise.reject(new DOMException("blocked"));"""
    )
    view.open()
    expect(view.page.locator("#problem-text")).to_contain_text("does not keep conversations")
    assert view.answer_to("hello")
    expect(view.titles).to_have_text(["hello"])


def test_a_conversation_that_another_tab_deletes_stays_deleted(view, page):
    view.answer_to("hello")
    view.new_tab().delete("hello")
    expect(page.locator("#conversations li")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    view.answer_to("😀" * 70)
    view.reload()
    expect(view.titles).to_have_text(["😀" * 59 + "…"])


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
        [_MESSAGE | {"files": [{"name": "a.png", "url": "https://example.com/a.png"}]}],
        [_MESSAGE | {"usage": {}}],
        [_MESSAGE | {"endedAt": "late"}],
        [_MESSAGE | {"role": "assistant"}],  # an answer to nothing
        _LOOP,  # a conversation without a first message
        [_MESSAGE, *_LOOP],  # one with two of the same id
    ],
    "leaf": [5, "b"],
}


def test_a_file_with_an_odd_field_is_not_imported(view, page):
    for field, value in [(field, value) for field, values in _ODD.items() for value in values]:
        conversation = {"title": "x", "messages": [], field: value}
        view.import_file("odd.json", [conversation])
        expect(page.locator("#problem-text")).to_have_text(
            f"odd.json is not an export of this page: its “{field}” is not valid."
        )
        page.click("#problem-again")
    view.import_file("none.json", [])
    expect(page.locator("#problem-text")).to_have_text("none.json contains no conversations.")
    expect(page.locator("#conversations li")).to_have_count(0)
    # A file with a title and messages is enough.
    old = {"title": "old", "messages": []}
    view.import_file("short.json", [old, {"title": "new", "messages": [], "updated": 10**15}])
    expect(page.locator("#problem")).to_be_hidden()
    expect(view.titles).to_have_text(["new", "old"])
    page.get_by_text("old").click()
    view.reload()
    view.answer_to("hello")
    expect(view.titles).to_have_text(["new", "old"])
