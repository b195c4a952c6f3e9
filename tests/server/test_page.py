"""The page in a real browser: chat, conversations, harmless markup, and the view of the engine."""

import json
import os
import re
import signal

import pytest
from playwright.sync_api import expect

from tests.support.server.kit import serving
from tests.support.server.page_kit import Shown, chromium, chromium_path, load
from vllm_metal_lite.server.page import FOLDER
from vllm_metal_lite.server.settings import ServerConfig

pytestmark = pytest.mark.long
WIDE = {"viewport": {"width": 1600, "height": 1000}}
USAGE = {
    "prompt_tokens": 1812,
    "completion_tokens": 640,
    "prompt_tokens_details": {"cached_tokens": 1600},
}


@pytest.fixture(scope="module")
def browser():
    if chromium_path() is None:
        pytest.skip("there is no Chromium or Chrome here")
    with chromium() as browser:
        yield browser


@pytest.fixture
def show(browser, running):
    """Opens the page in a fresh profile; at the end, nothing may have been complained about."""
    shown = []

    def show(**context) -> Shown:
        shown.append(Shown(browser, running.url, **context))
        return shown[-1]

    yield show
    complaints = [text for one in shown for text in one.complaints]
    for one in shown:
        one.context.close()
    assert not complaints


@pytest.fixture
def shown(show) -> Shown:
    """The page, open on a screen of the usual size."""
    return show()


@pytest.fixture
def page(shown):
    return shown.page


def answer_with(page, *deltas, usage=None, finish="stop"):
    """Let the page get these deltas as the answer to all its questions."""
    chunks = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if usage:
        chunks.append({"choices": [], "usage": usage})
    answer_with_events(page, *map(json.dumps, chunks), "[DONE]")


def answer_with_events(page, *events):
    body = "".join(f"data: {event}\n\n" for event in events)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )


def body_of(shown, text):
    """Ask; returns the body of the request."""
    with shown.page.expect_request("**/v1/chat/completions") as asked:
        shown.ask(text)
    return asked.value.post_data_json


def change_requests(page, path, **fields):
    """Let the server get these fields in the page's requests."""

    def change(route):
        body = {**route.request.post_data_json, **fields}
        route.continue_(post_data=json.dumps(body))

    page.route(f"**/v1/{path}", change)


def lasting_samples(page):
    """Let the sample requests run until they are stopped, however slow the browser is."""
    change_requests(page, "completions", max_tokens=3000)


# Without a browser


def test_files_come_with_strict_headers(http):
    for path in FOLDER.rglob("*"):
        if path.is_file() and path.suffix != ".md":
            response = http.get(f"/page/{path.relative_to(FOLDER).as_posix()}")
            assert response.content == path.read_bytes()
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
    index = http.get("/")
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    known = http.get("/", headers={"If-None-Match": index.headers["etag"]})
    assert (known.status_code, known.content) == (304, b"")


def test_nothing_comes_from_elsewhere_and_nothing_is_inline():
    for path in [*FOLDER.glob("*.html"), *FOLDER.glob("*.css"), *FOLDER.glob("**/*.js")]:
        if "vendor" in path.parts:
            continue
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://[a-z]", text), path
        assert ".innerHTML" not in text, path
    index = (FOLDER / "index.html").read_text("utf-8")
    assert not re.search(r"<style|<script>|\son[a-z]+=|\sstyle=", index)


# The chat


def test_a_chat_and_what_it_cost(shown, page):
    assert "remember" in shown.answer_to("Hi, my name is Ada and I parked my car on level 3.")
    assert shown.answer_to("Where is my car?") == "Your car is on level 3."
    expect(page.locator("#send")).to_be_visible()
    assert "first after" in page.locator(".cost").last.inner_text()
    expect(page.locator(".message.user")).to_have_count(2)


def test_what_was_drawn_is_not_drawn_again(shown, page):
    shown.answer_to("hello")
    first = page.locator(".message.assistant .text").first
    first.evaluate("e => { e.firstChild.mark = 1; }")
    shown.answer_to("hello again")
    assert first.evaluate("e => e.firstChild.mark") == 1


def test_the_cost_is_read_from_usage(shown, page):
    answer_with(page, {"content": "Good."}, usage=USAGE)
    shown.answer_to("How are you?")
    cost = page.locator(".cost").inner_text()
    assert re.search(r"1,812 tokens in \(1,600 cached\).*640 out", cost, re.S)


def test_markup_in_an_answer_is_harmless(shown, page):
    evil = """<script>window.bad = 1</script><img src="/x" onerror="window.bad = 2">
<a href="javascript:window.bad = 3" id="prompt">link</a> <svg onload="window.bad = 4"></svg>

![picture](https://example.com/track.png) <iframe src="https://example.com"></iframe>

<style>body { display: none }</style><form action="https://example.com"><input name="x"></form>

<div style="position: fixed; inset: 0" class="offscreen">over</div>

[go](javascript:window.bad%20=%205)
[there](https://example.com/a)
"""
    answer_with(page, {"content": evil})
    shown.answer_to(evil)
    assert page.evaluate("window.bad") is None
    inside = page.locator(".message .text")
    tags = ["script", "img", "iframe", "style", "form", "input", "svg"]
    for tag in [*tags, "[style]", "[id]", "[onerror]"]:
        expect(inside.locator(tag)).to_have_count(0)
    expect(inside.locator("[class=offscreen]")).to_have_count(0)
    expect(page.locator(".assistant .text")).to_contain_text("<script>window.bad = 1</script>")
    hrefs = inside.locator("a[href]").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
    assert hrefs == ["https://example.com/track.png", "https://example.com/a"]
    link = inside.locator("a[href]").last
    assert link.get_attribute("rel") == "noopener noreferrer"
    assert link.get_attribute("target") == "_blank"


def test_markdown_and_copied_code(show):
    shown = show(permissions=["clipboard-read", "clipboard-write"])
    text = (
        "# Head\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('<hi>')\n```\n\n- **one**\n"
    )
    answer_with(shown.page, *({"content": c} for c in text))
    shown.answer_to("show me")
    answer = shown.page.locator(".message.assistant .text")
    expect(answer.locator("h1")).to_have_text("Head")
    expect(answer.locator("td")).to_have_text(["1", "2"])
    expect(answer.locator("strong")).to_have_text("one")
    expect(answer.locator(".code-bar")).to_have_text("python")
    answer.get_by_label("Copy code").click()
    expect(shown.page.locator("#status")).to_have_text("Copied")
    expect(answer.locator(".done use")).to_have_attribute("href", "#i-check")
    expect(answer.locator(".hljs-built_in")).to_have_text("print")
    assert shown.page.evaluate("navigator.clipboard.readText()") == "print('<hi>')\n"


_GROWS = """First *line*.

- one
- two

  | a | b |
  |---|---|
  | 1 | 2 |

1. first
2. second

```python
def f():

    return 1
```

> quote
> continues

Last line<br>ends\r\nhere.
"""


@pytest.mark.parametrize("step", [1, 7, 100])
def test_an_answer_that_grew_looks_like_one_that_came_at_once(show, step):
    found = show().page.evaluate(
        """async ([text, step]) => {
          const { Growing } = await import("/page/markdown.js");
          const [grown, once] = [0, 1].map(() => document.createElement("div"));
          const growing = new Growing(grown);
          for (let n = step; n < text.length + step; n += step) {
            growing.show(text.slice(0, n), false);
          }
          new Growing(once).show(text, true);
          return [grown.innerText, once.innerText, growing.done];
        }""",
        [_GROWS, step],
    )
    assert found[0].split() == found[1].split()
    if step < 100:
        assert found[2] > len(_GROWS) / 2  # most of it was not rendered again


@pytest.mark.parametrize(
    "deltas",
    [
        [{"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "Four."}],
        [{"reasoning": "Let me see."}, {"content": "Four."}],
    ],
)
def test_thoughts_are_folded_away(shown, page, deltas):
    answer_with(page, *deltas)
    assert shown.answer_to("two and two") == "Four."
    thoughts = page.locator(".thoughts")
    expect(thoughts).to_be_hidden()
    page.get_by_text("Thoughts").click()
    expect(thoughts).to_have_text("Let me see.")


def test_thoughts_that_never_end(shown, page):
    answer_with(page, {"reasoning_content": "hm"}, finish="length")
    assert shown.answer_to("two and two") == ""
    expect(page.locator(".thoughts")).to_have_text("hm")
    expect(page.locator(".cost")).to_contain_text("cut off")


@pytest.mark.parametrize("text", ["<", "The tag is\n</think>\nand it closes."])
def test_text_that_looks_like_a_tag_of_thoughts_is_text(shown, page, text):
    """The server splits thoughts from answers, and the page splits nothing again."""
    answer_with(page, {"content": text})
    assert shown.answer_to("Only the sign.").split() == text.split()
    assert body_of(shown, "Sure?")["messages"][1] == {"role": "assistant", "content": text}
    expect(page.locator(".thoughts")).to_have_count(0)


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_ends_the_request(shown, page, running, way):
    change_requests(page, "chat/completions", ignore_eos=True, temperature=1)
    shown.ask("tell me a story")
    expect(page.locator(".message.assistant .text")).not_to_be_empty()
    if way == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    shown.answered(1)
    expect(page.locator(".cost")).to_contain_text("stopped after")
    expect(page.locator("#send")).to_be_visible()
    _until_idle(running, page)
    page.unroute_all()


def test_an_answer_stopped_before_its_first_token_says_so(shown, page):
    page.route("**/v1/chat/completions", lambda route: None)  # no answer comes
    shown.ask("hello")
    page.click("#stop")
    expect(page.locator(".message .note")).to_have_text("Stopped before the first token.")


def test_a_conversation_deleted_during_its_answer_stays_deleted(shown, page, running):
    change_requests(page, "chat/completions", ignore_eos=True, temperature=1)
    shown.ask("tell me a story")
    expect(page.locator(".message.assistant .text")).not_to_be_empty()
    page.locator("#conversations li").hover()
    page.get_by_label("Delete tell me a story").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    _until_idle(running, page)
    expect(page.locator("#conversations li")).to_have_count(0)
    page.reload()
    shown.ready()
    expect(page.locator("#conversations li")).to_have_count(0)
    page.unroute_all()


def _until_idle(running, page):
    for _ in range(200):
        if not running.server.requests:
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"requests that nobody reads still run: {list(running.server.requests)}")


def test_edit_and_ask_again_keeps_both(shown, page):
    assert shown.answer_to("Please reverse this list: red, green, blue") == "blue, green, red"
    page.get_by_label("Edit and ask again").click()
    assert page.get_by_label("Edit your message").bounding_box()["height"] < 60  # a line
    page.get_by_label("Edit your message").fill("Please reverse this list: one, two, three")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant[aria-busy=false] .text")).to_have_text(
        "three, two, one"
    )
    expect(page.locator(".message.user .version")).to_have_text("2 of 2")
    page.get_by_label("Previous version").click()
    expect(page.locator(".message.assistant .text")).to_have_text("blue, green, red")
    # Again: the old answer stays beside the new one.
    page.get_by_label("Answer again").click()
    expect(page.locator(".message.assistant .version")).to_have_text("2 of 2")


def test_conversations_stay_over_a_reload(shown, page):
    first = shown.answer_to("hello")
    page.click("#new")
    shown.answer_to("Please reverse this list: red, green, blue")
    page.reload()
    shown.ready()
    titles = page.locator("#conversations .title")
    expect(titles).to_have_text(["Please reverse this list: red, green, blue", "hello"])
    expect(page.locator(".message.assistant .text")).to_have_text("blue, green, red")
    page.fill("#search", "GREEN reverse")  # words of a message
    expect(titles).to_have_count(1)
    page.fill("#search", "nowhere")
    expect(page.locator("#no-match")).to_have_text("No conversation contains “nowhere”.")
    page.fill("#search", "")
    titles.last.click()
    expect(page.locator(".message.assistant .text")).to_have_text(first)
    page.locator("#conversations li").last.hover()
    page.get_by_label("Rename hello").click()
    page.fill("#ask-value", "greeting")
    page.keyboard.press("Enter")
    expect(titles.last).to_have_text("greeting")
    with page.expect_download() as download:
        page.click("#export")
    saved = json.loads(download.value.path().read_text("utf-8"))
    assert [c["title"] for c in saved] == ["Please reverse this list: red, green, blue", "greeting"]
    page.locator("#conversations li").last.hover()
    page.get_by_label("Delete greeting").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(titles).to_have_count(1)
    page.set_input_files("#import", download.value.path())
    expect(titles).to_have_count(3)


def test_two_tabs_know_of_each_other(shown, page):
    shown.answer_to("hello")
    other = shown.new_tab()
    other.click("#new")
    other.fill("#prompt", "Please reverse this list: red, green, blue")
    other.press("#prompt", "Enter")
    titles = page.locator("#conversations .title")
    expect(titles).to_have_text(["Please reverse this list: red, green, blue", "hello"])
    expect(page.locator(".message.user .text")).to_have_text("hello")


def test_a_conversation_that_another_tab_deletes_stays_deleted(shown, page):
    shown.answer_to("hello")
    other = shown.new_tab()
    other.locator("#conversations li").hover()
    other.get_by_label("Delete hello").click()
    other.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("#conversations li")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()
    shown.answer_to("hi")
    page.reload()
    shown.ready()
    expect(page.locator("#conversations .title")).to_have_text(["hi"])


_MESSAGE = {"id": "a", "role": "user", "content": "hello"}
_ODD = {
    "title": [None],
    "system": [5],
    "updated": ["today", None],
    "model": [5],
    "sampling": [None, 5, []],
    "messages": [5, [_MESSAGE | {"role": "tool"}], [_MESSAGE | {"files": {}}]],
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
    expect(page.locator("#conversations .title")).to_have_text(["new", "old"])
    page.get_by_text("old").click()
    page.reload()
    shown.ready()


def test_settings_are_sent(shown, page):
    page.click("#settings-open")
    page.fill("#set-system", "The code of the red box is 4821.")
    page.fill("#set-temperature", "0")
    page.fill("#set-max_tokens", "7")
    page.get_by_role("button", name="Save").click()
    body = body_of(shown, "What is the code of the red box?")
    assert body["messages"][0] == {"role": "system", "content": "The code of the red box is 4821."}
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 7, True)
    assert "top_p" not in body
    shown.answered(1)
    expect(page.locator("#effect")).to_contain_text("system prompt: The code of the red box")


def test_the_server_takes_every_setting(shown, page):
    page.evaluate(
        """localStorage.setItem("metal-lite-defaults", '{"sampling": {"thinking": true}}')"""
    )
    page.reload()
    shown.ready()
    page.click("#settings-open")
    numbers = {
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
    }
    for name, value in numbers.items():
        page.fill(f"#set-{name}", str(value))
    page.select_option("#set-thinking", "false")
    page.fill("#set-stop", "one\ntwo")
    page.fill("#set-schema", '{"enum": ["x"]')
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#set-schema:invalid")).to_be_visible()  # it is not saved
    page.fill("#set-schema", '{"enum": ["yes"]}')
    page.get_by_role("button", name="Save").click()
    body = body_of(shown, "hello")
    assert {name: body[name] for name in numbers} == numbers
    assert (body["stop"], body["reasoning_effort"]) == (["one", "two"], "none")
    assert shown.answered(1) == '"yes"'
    page.click("#effect")
    page.select_option("#set-thinking", "true")
    page.get_by_role("button", name="Save").click()
    body = body_of(shown, "hello")
    assert body["chat_template_kwargs"]["enable_thinking"] is True
    assert shown.answered(2) == '"yes"'


def test_text_files_go_with_a_message(shown, page):
    notes = {"name": "notes.md", "mimeType": "", "buffer": b"```\ncar: level 3\n```\n"}
    picture = {"name": "a.png", "mimeType": "image/png", "buffer": b"\x89PNG\0\xff"}
    page.set_input_files("#attach", [notes, picture])
    expect(page.locator("#problem")).to_contain_text("a.png is not UTF-8 text.")
    expect(page.locator("#attached li")).to_have_text(["notes.md"])
    answer_with(page, {"content": "Level 3."})
    body = body_of(shown, "Where is my car?")
    (message,) = body["messages"]
    fenced = "notes.md:\n````\n```\ncar: level 3\n```\n````"  # by more than the file holds
    assert message["content"] == f"{fenced}\n\nWhere is my car?"
    expect(page.locator("#attached li")).to_have_count(0)
    expect(page.locator("#problem")).to_be_hidden()
    page.get_by_text("notes.md").click()
    expect(page.locator(".attachment pre")).to_contain_text("car: level 3")


def test_an_error_is_said_and_can_be_tried_again(shown, page):
    error = {"error": {"message": "264 requests run or wait, and max_waiting is 256"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json=error))
    shown.ask("hello")
    expect(page.locator(".message .problem")).to_contain_text("max_waiting is 256")
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    assert shown.answered(1)
    expect(page.locator(".message .problem")).to_have_count(0)
    shown.forgive("503")


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ([], "The answer was cut off."),
        (['{"error": {"message": "the engine has ended"}}'], "the engine has ended"),
    ],
)
def test_an_answer_that_breaks_off_keeps_what_came(shown, page, last, words):
    chunk = {"choices": [{"index": 0, "delta": {"content": "Once upon"}, "finish_reason": None}]}
    answer_with_events(page, json.dumps(chunk), *last)
    assert shown.answer_to("tell me a story") == "Once upon"
    expect(page.locator(".message .problem")).to_contain_text(words)


def test_the_key_is_asked_for_until_it_is_right(browser):
    config = ServerConfig(port=0, api_key="secret")
    with serving(config=config) as running:
        shown = Shown(browser, running.url, opens=False, **WIDE)
        page = shown.page
        page.goto(running.url)
        for key in "wrong", "secret":
            page.fill("#key-value", key)
            page.keyboard.press("Enter")
        shown.ready()
        assert shown.answer_to("hello")
        expect(page.locator("#legend li")).to_have_count(4)  # the view has the key too
        assert all("401" in complaint for complaint in shown.complaints)
        shown.context.close()


def test_a_question_after_a_failed_one_keeps_roles_in_turns(shown, page):
    page.route(re.compile("chat/completions|health"), lambda route: route.abort())
    shown.ask("My name is Ada.")
    expect(page.locator(".message .problem")).to_contain_text("does not answer")
    page.unroute_all()
    expect(page.locator(".message .problem")).to_contain_text("it is back now.")
    body = body_of(shown, "What is my name?")
    assert body["messages"] == [{"role": "user", "content": "My name is Ada.\n\nWhat is my name?"}]
    shown.answered(2)
    shown.forgive("ERR_FAILED")


def test_keyboard_and_names_for_screen_readers(page):
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


def test_it_scrolls_along_only_at_the_end(show):
    shown = show(viewport={"width": 700, "height": 400})
    page = shown.page
    long = "\n\n".join(f"Paragraph {i}." for i in range(60))
    answer_with(page, {"content": long})
    shown.answer_to("write")
    left = "e => e.scrollHeight - e.scrollTop - e.clientHeight"
    expect(page.get_by_text("Paragraph 59.")).to_be_in_viewport()
    page.locator("#scroller").evaluate("e => { e.scrollTop = 0; }")
    expect(page.locator("#to-end")).to_be_visible()
    assert page.locator("#scroller").evaluate(left) > 100
    page.click("#to-end")
    expect(page.get_by_text("Paragraph 59.")).to_be_in_viewport()


# The engine


def test_the_view_of_the_engine_changes_under_load(show, running):
    shown = show(**WIDE, reduced_motion="no-preference")
    page = shown.page
    expect(page.locator("#legend li")).to_have_count(4)
    before = page.locator("#pool").get_attribute("aria-label")
    with load(running.url, 12):
        expect(page.locator("#requests li")).to_have_count(12)
        expect(page.locator("#samples")).to_be_in_viewport()
        expect(page.locator("#pool")).not_to_have_attribute("aria-label", before)
        expect(page.locator("#timeline")).to_have_attribute("aria-label", re.compile("decodes"))
        expect(page.locator("#requests .queued")).to_have_count(4)  # of 8 seats
        colours = page.locator("#pool").evaluate(
            """canvas => new Set(new Uint32Array(canvas.getContext('2d').getImageData(
               0, 0, canvas.width, canvas.height).data.buffer)).size"""
        )
        assert colours > 6
        page.locator("#requests li").first.hover()
        expect(page.locator("#requests .dim")).not_to_have_count(0)
        page.click("#engine-pause")
        expect(page.locator("#engine-state")).to_have_text("Paused")
        held = page.locator("#pool").get_attribute("aria-label")
        page.wait_for_timeout(700)
        assert page.locator("#pool").get_attribute("aria-label") == held
        page.click("#engine-pause")
        expect(page.locator("#pool")).not_to_have_attribute("aria-label", held)
    expect(page.locator("#no-requests")).to_be_visible()


def test_samples_can_be_sent_and_stopped(show, running):
    shown = show(**WIDE)
    shown.open("/#engine")
    page = shown.page
    expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#timeline")).to_be_visible()
    lasting_samples(page)
    page.click("#samples")
    expect(page.locator("#requests li")).to_have_count(18)
    page.click("#samples")
    expect(page.locator("#no-requests")).to_be_visible()
    expect(page.locator("#samples")).to_have_text("Send 18 samples")
    _until_idle(running, page)


def test_why_samples_are_refused_stays_until_they_are_sent_again(show):
    shown = show(**WIDE)
    page, state = shown.page, shown.page.locator("#engine-state")
    error = {"error": {"message": "the server is busy"}}
    page.route("**/v1/completions", lambda route: route.fulfill(status=503, json=error))
    page.click("#samples")
    expect(state).to_have_text("the server is busy")
    with page.expect_response("**/v1/chat/completions"):
        shown.answer_to("hello")
    expect(page.locator("#no-requests")).to_be_visible()
    page.wait_for_timeout(500)  # events come
    expect(state).to_have_text("the server is busy")
    page.unroute_all()
    page.click("#samples")
    expect(state).to_be_hidden()
    page.click("#samples")
    expect(page.locator("#no-requests")).to_be_visible()
    shown.forgive("503")


def test_the_end_of_the_engine_is_said(browser):
    with serving() as running:
        shown = Shown(browser, running.url, **WIDE)
        expect(shown.page.locator("#legend li")).to_have_count(4)
        (client,) = running.server.models.loaded.values()
        os.kill(client.pid, signal.SIGKILL)
        state = shown.page.locator("#engine-state")
        expect(state).to_contain_text(
            "demo is not running: the engine's process has ended by SIGKILL"
        )
        expect(shown.page.locator("#legend li")).to_have_count(0)
        shown.context.close()


def test_numbers_from_before_a_long_step_are_not_shown_as_current(show, running):
    shown = show(**WIDE)
    page = shown.page
    expect(page.locator("#legend li")).to_have_count(4)
    (client,) = running.server.models.loaded.values()
    os.kill(client.pid, signal.SIGSTOP)
    try:
        page.click("#samples")
        expect(page.locator("#requests-size")).to_have_text("18 unfinished")
        expect(page.locator("#engine-state")).to_contain_text("a long step is running")
        expect(page.locator("#figures dd").first).to_have_text("–")
    finally:
        os.kill(client.pid, signal.SIGCONT)
    expect(page.locator("#engine-state")).to_be_hidden()
    page.click("#samples")
    _until_idle(running, page)


def test_nobody_watches_behind_a_closed_panel(show, running):
    shown = show(**WIDE)
    page = shown.page
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/events")):
        page.click("#engine-close")
    with page.expect_request("**/events"):
        page.click("#engine-toggle")


# How it looks


@pytest.mark.parametrize("width", [1280, 1440])
def test_a_laptop_shows_the_engine_whole(show, width):
    shown = show(viewport={"width": width, "height": 800})
    page = shown.page
    assert page.locator("#engine").is_visible() == (width >= 1440)  # at the first visit
    answer_with(page, {"content": "a " * 40}, usage=USAGE)
    shown.answer_to("hello")
    if width < 1440:
        page.click("#engine-toggle")
    expect(page.locator("#legend li")).to_have_count(4)
    lasting_samples(page)
    page.click("#samples")
    expect(page.locator("#requests li")).to_have_count(18)
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
    page.click("#samples")
    expect(page.locator("#no-requests")).to_be_visible()


def test_fingers_find_every_button(show):
    shown = show(viewport={"width": 390, "height": 844})
    page = shown.page
    answer_with(page, {"content": "```c\n1\n```"}, usage=USAGE)
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


@pytest.mark.parametrize("width", [360, 390])
def test_a_phone_shows_the_samples_button_beside_its_title(show, width):
    page = show(viewport={"width": width, "height": 844}).page
    page.click("#engine-toggle")
    lasting_samples(page)
    for num_requests in (0, 18):
        expect(page.locator("#requests li")).to_have_count(num_requests)
        title, button = page.locator("#requests-title, #samples").evaluate_all(
            "all => all.map((e) => e.getBoundingClientRect().toJSON())"
        )
        assert button["top"] < (title["top"] + title["bottom"]) / 2 < button["bottom"]
        page.click("#samples")
    expect(page.locator("#no-requests")).to_be_visible()


@pytest.mark.parametrize("thinking", [True, False, None])
def test_the_thinking_switch_is_shown_where_the_model_has_one(show, thinking):
    """Also of a model that is not loaded yet, and where a conversation has it set."""
    shown = show(opens=False)
    page = shown.page

    def models(route):
        listed = route.fetch().json()
        listed["data"][0]["thinking"] = thinking
        route.fulfill(json=listed)

    page.route("**/v1/models", models)
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
    answer_with(page, {"content": "`" + "long" * 200 + "`\n\n```\n" + "wide " * 200 + "\n```\n"})
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
    assert len(page.screenshot()) > 10_000
    page.evaluate("switchTheme()")
    other = {"light": "dark", "dark": "light"}[scheme]
    assert page.evaluate("document.documentElement.dataset.theme") == other
